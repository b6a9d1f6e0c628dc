"""Timing of a call, on a GPU under load and on a CPU, and lines through times."""
