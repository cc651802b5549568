"""Rewrites of nodes to a canonical form."""
