"""Sample calls, by family of ops, for the page of rules and for their tests."""
