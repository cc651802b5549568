"""Finds the compute shardings of parameters that `place` does not give."""
