"""Chooses the program of a call; checks that all ranks make the same call."""
