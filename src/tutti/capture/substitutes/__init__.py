"""Ops that a trace calls in another form."""
