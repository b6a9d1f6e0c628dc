"""How long a run takes on given chips: matmuls, the pipeline's bubble, exchanges, gradients."""
