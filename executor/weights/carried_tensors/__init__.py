"""Tensors of a folder that are not trained: held by their places, written back as they were."""
