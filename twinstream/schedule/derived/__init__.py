"""Derived from a schedule: the waits of its slots and order, and the flush of its updates."""
