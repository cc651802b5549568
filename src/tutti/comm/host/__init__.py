"""Ranks of one host, in memory that they share."""
