"""Tests of what the device does: requests carried out, peers."""
