"""Clusters in numbers: nodes, links, networks and measured collectives, each with its source."""
