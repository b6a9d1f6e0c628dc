"""What throughput hangs on, and what would reach a target."""
