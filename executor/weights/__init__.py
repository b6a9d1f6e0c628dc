"""Weights of a Hugging Face folder, in and out of flat tensors."""
