"""A loader as one rank of many would read it, in this process alone: its parts are plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from tutti.data import loader as loader_file
from tutti.data.batch_shards import ShardedBatches
from tutti.layout import Layout


@contextmanager
def as_rank(layout: str, rank: int) -> Iterator[None]:
    """A block in which loaders are those of `rank`; batches hold this rank's rows."""
    found = Layout.parse(layout)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(loader_file, "met", lambda _: (found, rank)))
        stack.enter_context(mock.patch.object(loader_file, "check_same", lambda *_: None))
        stack.enter_context(mock.patch.object(loader_file, "batch_mesh", lambda *_: None))
        stack.enter_context(mock.patch.object(ShardedBatches, "of", lambda _, part, __: part))
        yield
