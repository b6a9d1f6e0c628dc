"""Machines as numbers with sources: TOML profiles, overrides, and times of work alone on them."""
