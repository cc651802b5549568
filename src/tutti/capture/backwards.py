"""The start and the end of each backward: observers wrap PyTorch's autograd engine here.

An observer entered later wraps the earlier ones, nearer to the caller:

    around_backward(regions), around_backward(gradients)    gradients(regions(engine))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tutti.capture.patch_table import BACKWARD
from tutti.graph.edits.patch import replaced

Engine = Callable[..., Any]


@contextlib.contextmanager
def around_backward(observer: Callable[[Engine], Engine]) -> Iterator[None]:
    """Inside, each backward runs through `observer(engine)`, where `engine` includes earlier observers."""
    run = observer(BACKWARD[0].original)
    with replaced(*((patch, run) for patch in BACKWARD)):
        yield
