"""What a run starts from and leaves: parameters and optimizer state."""
