"""Commands that run on this machine, or look at what ran."""
