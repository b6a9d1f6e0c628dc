"""Hugging Face configs, read key by key."""
