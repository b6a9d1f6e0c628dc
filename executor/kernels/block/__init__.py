"""A transformer block forward, backward and recomputed."""
