"""Refusals: what is proven to be needed, and what was tried and fits."""
