"""What is trained and how: frozen groups, adapters, few-bit bases, update rules."""
