"""The linear program behind every plan: a proven lower bound, and fractions to decide by."""
