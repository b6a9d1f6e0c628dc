"""A schedule for many devices: a mesh, classes of equal ranks, one schedule each, and its proof."""
