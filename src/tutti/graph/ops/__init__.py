"""The ops that tutti adds to a graph, and their kernels."""
