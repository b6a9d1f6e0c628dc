"""Predictions held against measurements: validation of tables, and calibration by the simulator."""
