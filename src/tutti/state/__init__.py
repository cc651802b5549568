"""Where the state of a step lives between its calls."""
