"""How fast tutti is, next to its peers; see README.md in this directory."""
