"""Prices of layered models on clusters: strategies by class of layer, memory, search."""
