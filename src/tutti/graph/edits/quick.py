"""Faster construction of graphs, without PyTorch's own notes and checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tutti.graph.edits.patch import Patch, replaced
from tutti.torch_private.pytrees import NO_SEARCH, SEARCH_OF_ARGUMENTS, searches_arguments
from tutti.torch_private.quick_fakes import SNAPSHOTS, snapshot
from tutti.torch_private.quick_nodes import RECORD_OF_OPS, recorded
from tutti.torch_private.tracing import METADATA_OF_NODES

PATCHES = (
    Patch(
        *SEARCH_OF_ARGUMENTS,
        "a new node's arguments are not searched for symbols to warn of",
        all_threads=True,
    ),
    Patch(*METADATA_OF_NODES, "a value is described once, as `val`", all_threads=True),
    Patch(
        *SNAPSHOTS,
        "the value of a node is copied without the checks of a new fake",
        all_threads=True,
    ),
    Patch(
        *RECORD_OF_OPS,
        "an op with plain arguments is recorded without a search among them",
        all_threads=True,
    ),
)


@contextlib.contextmanager
def quickly_written() -> Iterator[None]:
    """Inside, PyTorch neither searches a new node's arguments for symbols to warn of nor describes its value
    a second time (`tensor_meta`, beside `val`). That saves a tenth of the time to make a program.
    """
    if not searches_arguments():  # another PyTorch, or inside already
        yield
        return
    with replaced(*zip(PATCHES, (NO_SEARCH, lambda _: None, snapshot, recorded), strict=True)):
        yield
