"""Cut the step, plan each promising cut, learn from the simulation, keep the fastest."""
