"""Training on several ranks: their plan, and what each has of the machine."""
