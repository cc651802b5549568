"""Plans of a user's step: estimates of every layout, the choice, and plans as files."""
