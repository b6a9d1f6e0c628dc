"""A traced module's weights in files, both ways."""
