"""Collectives between real ranks."""
