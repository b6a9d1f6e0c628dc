"""Policies that follow fixed rules: our own, and models of what other systems do."""
