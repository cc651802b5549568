"""Replicas: whole programs that agree with each other now and then."""
