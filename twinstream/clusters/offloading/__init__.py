"""Which of a stage's tensors live in host memory, and when they are copied."""
