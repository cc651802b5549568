"""Starts the ranks, workers and servers of a run, and reports how they ended."""
