"""Ranks, workers and servers of a run: how they start, and how they end."""
