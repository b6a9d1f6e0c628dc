"""What draws, reads, writes and runs the models of each provider."""
