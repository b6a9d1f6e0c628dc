"""Tests of calls on a lent machine."""
