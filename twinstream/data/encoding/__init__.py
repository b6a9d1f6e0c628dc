"""Rows become tokens here: tokenizer, chat template, which tokens are learned, and the cache."""
