"""Updates by other rules than AdamW: those that look at each element by itself, and Muon."""
