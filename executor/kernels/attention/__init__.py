"""Attention forward and backward: our own, and those of libraries."""
