"""The device's process: what it is asked, and how it answers."""
