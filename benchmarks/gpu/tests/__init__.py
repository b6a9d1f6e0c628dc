"""Tests of the campaign, on stand-ins and tiny models."""
