"""Commands that plan, once or many times."""
