"""Deep models from shallow ones: layers that repeat are captured twice or three times, and counted."""
