"""Parallel layouts of a training step, and the sizes and work of each rank."""
