"""What a schedule and a timeline come to, in numbers."""
