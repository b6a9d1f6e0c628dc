"""Counts the scratch that kernels take: of blocks, of parts of them, at the ends of a decoder."""
