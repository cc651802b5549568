"""Predicted memory and time of a program."""
