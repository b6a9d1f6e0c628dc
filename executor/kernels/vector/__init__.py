"""All but matmuls and attention, as one interface, and in torch ops."""
