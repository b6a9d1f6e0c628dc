"""How far predictions are from measured runs, and what calibration makes of them."""
