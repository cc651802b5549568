"""Spreads the shardings that are given through the whole graph, each with its provenance."""
