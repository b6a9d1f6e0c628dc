"""Training runs: options, the loop, checkpoints, metrics."""
