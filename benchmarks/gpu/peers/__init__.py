"""Llama trained in plain PyTorch and FSDP2, to compare with."""
