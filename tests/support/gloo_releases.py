"""Memory measured without tensors that Gloo's threads still hold: collectives wait for their release.

Gloo's threads release a collective's tensors a little after it has ended, and the profiler of the calling
thread does not see what another thread frees: on a busy machine a measured peak may count them for ever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from tutti.comm.collectives import transport


@contextlib.contextmanager
def waited_for() -> Iterator[None]:
    """Within it, a collective returns when no other thread holds its tensors."""

    def waiting(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Any] = [x for x in args if isinstance(x, Tensor)]
            before = [x._use_count() for x in tensors]
            result = move(*args, **kwargs)
            while [x._use_count() for x in tensors] != before:
                time.sleep(0)
            return result

        return moved

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (transport, "_gather"),
            (dist, "all_to_all_single"),
            (dist, "all_reduce"),
        ):
            stack.enter_context(mock.patch.object(owner, name, waiting(getattr(owner, name))))
        yield
