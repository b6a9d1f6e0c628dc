"""From rows to tokens: tokenizer, chat template, which tokens are learned, and the cache."""
