"""Named rewrites of a partitioned program that keep its values and make it cheaper."""
