"""Mixtures of experts: routing, permutation of rows, and matmuls of every expert's rows."""
