"""A schedule compiled once, and how it is to be run."""
