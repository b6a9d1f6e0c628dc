"""Many devices in virtual time: one set of streams for each class of ranks, and their exchanges."""
