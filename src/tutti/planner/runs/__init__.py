"""Whole runs: failures and checkpoints, workers that do not wait for each other."""
