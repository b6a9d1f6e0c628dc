"""From fractions to whole decisions: what stays, what leaves, what is recomputed, and when."""
