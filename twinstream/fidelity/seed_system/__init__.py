"""The seed system's own policy, registered like a user's: its schedule of a training step."""
