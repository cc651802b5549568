"""The axis `micro`: the time of each node and collective."""
