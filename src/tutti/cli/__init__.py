"""The `tutti` command."""
