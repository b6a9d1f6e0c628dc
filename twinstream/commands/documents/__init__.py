"""Commands that read schedules and timelines."""
