"""What the probe times: kernels of task chains, matmuls, attention; and curves of the times."""
