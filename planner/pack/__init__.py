"""From decisions to offsets within both memories."""
