"""From decisions to byte offsets within both memories."""
