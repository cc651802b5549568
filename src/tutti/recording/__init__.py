"""Keeps the records of a run while it trains: steps, programs, events."""
