"""Pipelines: who does what, in which order. A schedule is a value; none of this needs a process."""
