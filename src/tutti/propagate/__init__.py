"""Spreads given shardings through the whole graph, each with its provenance."""
