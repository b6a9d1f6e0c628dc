"""What other links, memory or GPUs do to a step on a cluster, with its layout or another."""
