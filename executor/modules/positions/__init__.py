"""How long sequences may be by the positions that a module has."""
