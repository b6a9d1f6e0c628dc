"""Text as training data."""
