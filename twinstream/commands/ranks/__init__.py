"""What the commands do with schedules whose ranks run as processes."""
