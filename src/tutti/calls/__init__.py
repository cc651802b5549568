"""What a trace depends on, call by call; ranks that are in the same call."""
