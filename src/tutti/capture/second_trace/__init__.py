"""The second trace: the same step without mutation."""
