"""The log of a training run: what it writes of its steps, and the names of its files."""
