"""Schedules as values: their text, the named ones, transfers, validation."""
