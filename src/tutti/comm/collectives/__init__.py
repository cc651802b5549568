"""Collectives and messages of one program between ranks."""
