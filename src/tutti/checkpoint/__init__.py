"""The files of a checkpoint: whole, checked, visible by one rename, and read without running code."""
