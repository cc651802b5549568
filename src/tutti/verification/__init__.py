"""Proves that a partitioned step is the same step."""
