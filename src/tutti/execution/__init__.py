"""A partitioned program on this rank."""
