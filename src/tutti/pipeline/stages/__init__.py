"""Stages: the cut of forward and backward, and the parts that a loop runs."""
