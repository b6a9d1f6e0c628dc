"""The arenas that slots lie in, and the limits of what there is."""
