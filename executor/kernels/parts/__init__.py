"""Computes a decoder in parts, as tensor parallelism splits it, and adds up what parts make."""
