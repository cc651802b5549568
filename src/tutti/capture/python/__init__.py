"""The Python values that a step reads and changes, and the tensors' values that its Python reads."""
