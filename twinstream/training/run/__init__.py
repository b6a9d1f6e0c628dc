"""The passes of a run: what they are fed, what is recorded, checkpoints, the end."""
