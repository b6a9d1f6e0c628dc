"""Run a schedule on torch: on a GPU's streams, or on threads."""
