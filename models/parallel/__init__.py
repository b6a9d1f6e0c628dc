"""How a training step is divided over ranks: the layout, the job, the order of a pipeline."""
