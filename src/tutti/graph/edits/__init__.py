"""Edits of graphs, and patches of other libraries while graphs are written."""
