"""A cell: planned and predicted, run for a few rounds, extended to the whole step."""
