"""Keeps the state of a step between its calls."""
