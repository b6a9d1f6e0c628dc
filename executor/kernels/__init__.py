"""The kernels that ops call, composed of matmuls, attention and vector operations."""
