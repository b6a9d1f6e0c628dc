"""The costs of each kernel: FLOPs, bytes, launches, scratch and its libraries' own memory."""
