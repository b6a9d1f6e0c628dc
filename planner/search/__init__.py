"""The search: plan each promising cut of the step, learn from simulation, keep the fastest."""
