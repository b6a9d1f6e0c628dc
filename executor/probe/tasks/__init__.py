"""What is timed: kernels of task chains, matrix products, attention; and the curves they give."""
