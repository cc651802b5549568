"""Parameter servers: they own the variables, workers push gradients and pull weights."""
