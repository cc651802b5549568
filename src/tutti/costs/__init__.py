"""The time of ops and collectives on devices and links that are data."""
