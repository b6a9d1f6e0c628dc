"""Published tables of training steps, made the one form of table that twinstream reads."""
