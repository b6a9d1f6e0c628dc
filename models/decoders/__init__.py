"""Decoders: what a config.json says, sizes, names of weights."""
