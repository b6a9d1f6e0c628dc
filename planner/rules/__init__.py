"""Policies by fixed rules: our own, and models of what others do."""
