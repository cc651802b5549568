"""Facts about a graph: memory, lifetimes, order, cost."""
