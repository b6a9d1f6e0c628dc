"""The planner: from a chain of tasks, a machine and memory caps to a proven schedule."""
