"""Runs: from a schedule, a state and data to a measured timeline."""
