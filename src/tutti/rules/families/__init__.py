"""The rules, by family of ops."""
