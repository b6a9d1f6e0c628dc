"""Many plans at once: a grid of values from a file, rows on the disk, figures."""
