"""Predicted training steps of clusters held against published ones, and what is fitted to them."""
