"""Queries of training steps with values changed: what-ifs, sweeps, the explorer."""
