"""Saves a step under one layout and loads it under any."""
