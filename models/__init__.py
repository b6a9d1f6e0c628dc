"""Architectures: specs from presets and Hugging Face configs, and the recipe of a training step."""
