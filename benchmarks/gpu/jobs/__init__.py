"""What a campaign is to measure, what it found, and the folder that keeps both."""
