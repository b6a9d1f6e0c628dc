"""Numbers as tables and lines of a terminal."""
