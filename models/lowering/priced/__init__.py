"""Lowers a stage by kernel sets that are priced and not run here, split over tp, cp and ep."""
