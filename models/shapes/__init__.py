"""Models by their sizes alone, as clusters are priced with: dense, gated or not, experts."""
