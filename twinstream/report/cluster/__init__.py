"""Clusters to look at: a group of lanes for each class of ranks, and why compute waited."""
