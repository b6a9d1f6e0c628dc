"""Ranks of a cluster's schedule, run here: what they are fed, and what they then come to."""
