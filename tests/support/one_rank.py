"""Loaders as the ranks of a run would read them, in this process alone: their parts are plain tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any
from unittest import mock

import tutti
from tutti.data import loader as loader_file
from tutti.data.batch_shards import ShardedBatches
from tutti.data.rank_rows import rows
from tutti.layout import Layout


@contextmanager
def as_rank(layout: str, rank: int) -> Iterator[None]:
    """A block in which loaders are those of `rank`; batches hold this rank's rows."""
    found = Layout.parse(layout)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(loader_file, "met", lambda _: (found, rank)))
        stack.enter_context(mock.patch.object(loader_file, "check_same", lambda *_: None))
        stack.enter_context(mock.patch.object(loader_file, "shared_reads", lambda *_: None))
        stack.enter_context(mock.patch.object(loader_file, "batch_mesh", lambda *_: None))
        stack.enter_context(mock.patch.object(ShardedBatches, "of", lambda _, part, __: part))
        yield


def next_batches(loader: tutti.Loader, count: int) -> list[Any]:
    """The next batches as lists, over as many epochs as they take."""
    found: list[Any] = []
    while len(found) < count:
        found += [b.tolist() for b in islice(loader, count - len(found))]
    return found


def assert_one_run(make: Callable[[], tutti.Loader], legs: Sequence[tuple[int, str]]) -> None:
    """Legs, each of so many batches under a layout, resumed from each other's state, are one undisturbed run.

    Every rank has its rows of each batch, and the state of the others.
    """
    expected = next_batches(make(), sum(count for count, _ in legs))
    done, state = 0, json.dumps(make().state_dict())
    for count, text in legs:
        layout, states = Layout.parse(text), set()
        for rank in range(layout.num_ranks):
            with as_rank(text, rank):
                loader = make()
                loader.load_state_dict(json.loads(state))
                found = next_batches(loader, count)
                for batch, whole in zip(found, expected[done : done + count], strict=True):
                    own = rows(len(whole), layout, rank)
                    assert batch == whole[own.start : own.stop]
                states.add(json.dumps(loader.state_dict()))
        (state,) = states
        done += count
