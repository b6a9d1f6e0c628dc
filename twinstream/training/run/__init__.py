"""The parts of a run: data and metrics of steps, checkpoints, evaluations, its folder, its end."""
