"""Sample calls, by family of ops: they fill a page and test the rules."""
