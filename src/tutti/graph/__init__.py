"""Graphs: their collectives and random numbers, text form, edits, and virtual ranks that play them."""
