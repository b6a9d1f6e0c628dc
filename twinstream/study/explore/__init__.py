"""Plans on a page whose controls are model, machines, caps and lengths."""
