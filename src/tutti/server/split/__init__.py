"""Splits a captured step in three: the worker's part, the coupling of variables, the update of each."""
