"""The page of a run: one file without scripts, which needs no network."""
