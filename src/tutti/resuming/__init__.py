"""The checkpoints of a run: saved while it trains, kept in a folder, stopped by signals, and resumed."""
