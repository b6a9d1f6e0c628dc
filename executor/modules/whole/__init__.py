"""Models of which a part is trained: which, and what the whole calls its tensors."""
