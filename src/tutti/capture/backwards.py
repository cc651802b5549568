"""Where a backward begins and ends: whoever has to know wraps PyTorch's autograd engine here.

An observer that is entered later stands inside of the earlier ones, nearer to the caller:

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
    """Inside, each backward runs through what `observer` makes of the engine, and of earlier observers."""
    run = observer(BACKWARD[0].original)
    with replaced(*((patch, run) for patch in BACKWARD)):
        yield
