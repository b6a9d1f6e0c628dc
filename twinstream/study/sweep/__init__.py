"""Many queries at once: a grid of values from a file, rows on the disk, figures."""
