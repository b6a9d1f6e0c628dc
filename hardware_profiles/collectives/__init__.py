"""How long collectives take on a cluster: algorithms in closed form, curves from measurements."""
