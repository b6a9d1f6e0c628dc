"""Whole decisions from the program's fractions: what is kept, offloaded or recomputed."""
