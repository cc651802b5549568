"""Frames: the format of messages in bytes."""
