"""Documents that cross every border: schedules, chains and timelines, their files, and errors."""
