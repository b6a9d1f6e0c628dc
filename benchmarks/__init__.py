"""What measures twinstream, and is not installed with it: on GPUs, of plans, of predictions."""
