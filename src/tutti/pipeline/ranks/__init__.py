"""Pipeline ranks: their state, messages, rows and graphs."""
