"""A model, a workload and a recipe lowered to the chain of tasks of one training step."""
