"""The state that a run starts from and leaves: parameters and optimizer state."""
