"""The tasks that the probe times (kernels, matmuls, attention), and curves of the times."""
