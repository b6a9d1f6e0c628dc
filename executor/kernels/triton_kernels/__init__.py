"""The vector operations as Triton kernels."""
