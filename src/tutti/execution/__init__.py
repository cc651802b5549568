"""Runs a partitioned program on this rank."""
