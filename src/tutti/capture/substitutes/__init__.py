"""Other forms of ops for a trace."""
