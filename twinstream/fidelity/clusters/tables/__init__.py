"""Published tables of measured training steps, each of its own columns, as jobs with a time."""
