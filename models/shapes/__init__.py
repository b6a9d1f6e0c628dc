"""Models by their sizes alone, of kinds that are priced on clusters: dense, gated or not, experts."""
