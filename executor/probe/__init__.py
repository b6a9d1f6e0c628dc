"""Measure a device: which kernels are right and fastest there, and its profile."""
