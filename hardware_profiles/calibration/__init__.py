"""Measurements in, profile out; the predictor is an argument."""
