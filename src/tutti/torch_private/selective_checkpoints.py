"""Where a selective checkpoint asks whether a tracer runs it."""

from typing import Any

from torch.utils import checkpoint

# The function `(op, args, kwargs)` by which a selective checkpoint asks whether a tracer records the ops. If
# so, it keeps every value, and leaves to a compiler what to recompute.
# Why: the trace of a step is what runs. Public: none.
CHECK_OF_TRACING: tuple[Any, str] = (checkpoint, "_is_compiling")
