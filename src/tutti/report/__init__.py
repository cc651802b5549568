"""Draws results; decides nothing."""
