"""Python values that a step reads and changes, and values of tensors that its Python reads."""
