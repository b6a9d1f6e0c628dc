"""From a user's options to a training run and what it comes to."""
