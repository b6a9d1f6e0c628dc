"""What cards can do with a model."""
