"""Training on a cluster: layouts of a model over ranks, their schedules, and a search of them."""
