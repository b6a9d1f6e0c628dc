"""Calls on a lent machine, beside a campaign that runs on there."""
