"""What runs on each rank, and what starts the ranks."""
