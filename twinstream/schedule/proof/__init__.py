"""Proofs before anything runs: a schedule is safe, and computes exactly what its chain says."""
