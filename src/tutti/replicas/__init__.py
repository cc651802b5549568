"""Replicas: whole programs that exchange weights periodically (local SGD)."""
