"""A captured step in three: the part of a worker, what couples variables, the update of each."""
