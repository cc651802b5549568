"""Graphs written without what PyTorch notes and checks for its own sake."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch.fx import graph as fx_graph
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree

from tutti.graph.patch import Patch, replaced

PATCHES = (
    Patch(fx_graph, "pytree", "a new node's arguments are not searched for symbols to warn of"),
    Patch(proxy_tensor, "_extract_tensor_metadata", "a value is described once, as `val`"),
)
_NOTHING: Any = SimpleNamespace(**(vars(_pytree) | {"tree_iter": lambda *_: ()}))


@contextlib.contextmanager
def quickly_written() -> Iterator[None]:
    """Inside, a new node's arguments are not searched for symbols to warn of, and its value is not described
    a second time (`tensor_meta`, beside `val`): a tenth of the time in which a program is made.
    """
    if getattr(fx_graph, "pytree", None) is not _pytree:  # another PyTorch, or inside already
        yield
        return
    with replaced(*zip(PATCHES, (_NOTHING, lambda _: None), strict=True)):
        yield
