"""A step in files, and from them again."""
