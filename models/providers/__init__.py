"""What every model offers to planning, and what is trained of it."""
