"""Rewrites of a partitioned program that keep its values and make it cheaper; each has a name."""
