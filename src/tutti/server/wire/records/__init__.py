"""The files of a server: pushes, journals, snapshots, recovery."""
