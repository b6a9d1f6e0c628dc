"""Timelines to look at: one HTML page of figures, and a trace for Perfetto."""
