"""Times of collectives on a cluster: algorithms in closed form, curves from measurements."""
