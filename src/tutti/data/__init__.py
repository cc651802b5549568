"""Batches of which each rank reads its rows, in an order that no layout changes."""
