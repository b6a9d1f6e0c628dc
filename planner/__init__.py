"""Chain, machine and caps in, a proven schedule out."""
