"""Figures that are computed from a schedule and a timeline."""
