"""Pipelines: stages, and the order of their actions on each rank. None of this needs a process."""
