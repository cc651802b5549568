"""A call whose frames lie in one piece of memory.

CPython keeps the frames of Python calls in chunks of 16 kB, and maps and unmaps a chunk each time that calls
cross its end: tracing does so thousands of times. A chunk is larger where one frame alone needs more, and
later frames share what is left of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def roomy(call: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """`call(*args, **named)`, with half a megabyte for its frames."""
    return call(*args, **named)


# 8 bytes a slot, just above 512 kB: the chunk has 1 MB. What no frame touches takes no memory.
roomy.__code__ = roomy.__code__.replace(co_stacksize=66_000)
