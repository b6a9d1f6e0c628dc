"""The schedule of an evaluation: the forward of a training schedule, in the same arenas."""
