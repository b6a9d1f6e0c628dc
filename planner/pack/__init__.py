"""Give decisions byte offsets within both memories."""
