"""What each kernel asks of a machine: FLOPs, bytes, launches, scratch and libraries' own memory."""
