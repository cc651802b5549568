"""Estimates of many layouts of a deep model in two processes: the other one takes half of the kinds.

A layout's kind is the sizes of its model axes: layouts of one kind share placements and pieces of the model.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch

from tutti.errors import LayoutError, ScheduleError, ShardingError
from tutti.layout import Layout
from tutti.planner.depth.block_work import MODEL_AXES
from tutti.planner.estimates.layout_estimate import Estimate

# Fewer are done before a second process pays.
LEAST_LAYOUTS = 200
# An estimate and its placement of least memory, if it has one; or why the step does not allow the layout.
Outcome = tuple[Estimate, Mapping[str, str] | None] | LayoutError | ShardingError | ScheduleError


def other_half(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts for another process: about half of those of different pieces, in whole kinds."""
    pieces: dict[Any, set[tuple[int, bool, str]]] = {}
    for one in layouts:
        rows = one.axes.get("data", 1) * one.micro
        pieces.setdefault(_kind(one), set()).add((rows, one.in_time, one.precision))
    mine: Counter[bool] = Counter()
    goes: dict[Any, bool] = {}
    for kind, found in sorted(pieces.items(), key=lambda item: -len(item[1])):
        goes[kind] = mine[True] < mine[False]
        mine[goes[kind]] += len(found)
    return [one for one in layouts if goes[_kind(one)]]


def _kind(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((a, n) for a, n in layout.axes.items() if a in MODEL_AXES)


def can_share(layouts: Sequence[Layout]) -> bool:
    """Whether a second process may and should take a part: a GPU in use does not survive a fork."""
    several = len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False
    return several and len(layouts) >= LEAST_LAYOUTS and not torch.cuda.is_initialized()


class OtherProcess:
    """A process that estimates some layouts by a copy of this one's estimates.

    Args:
        layouts: to estimate.
        outcome: of a layout.
        pieces: what it has made on the way, for later estimates; it must be readable by another process.
    """

    def __init__(
        self,
        layouts: Iterable[Layout],
        outcome: Callable[[Layout], Outcome],
        pieces: Callable[[], Mapping[Any, Any]] = dict,
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._receiving, sending = context.Pipe(duplex=False)
        args = (list(layouts), outcome, pieces, sending)
        self._process = context.Process(target=_run, args=args, daemon=True)
        self._process.start()
        sending.close()

    @property
    def outcomes(self) -> dict[Layout, Outcome]:
        """What it has found, once it has ended; nothing if it has failed."""
        return self._answer[0]

    @property
    def pieces(self) -> Mapping[Any, Any]:
        """What it has made on the way."""
        return self._answer[1]

    @cached_property
    def _answer(self) -> tuple[dict[Layout, Outcome], Mapping[Any, Any]]:
        try:
            return self._receiving.recv()
        except (EOFError, OSError):
            return {}, {}
        finally:
            self._receiving.close()
            self._process.join()


def _run(
    layouts: Iterable[Layout],
    outcome: Callable[[Layout], Outcome],
    pieces: Callable[[], Mapping[Any, Any]],
    sending: Connection,
) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # the other process says it
        sending.send(({layout: outcome(layout) for layout in layouts}, pieces()))
    sending.close()


def outcome_of(
    layout: Layout,
    estimate: Callable[[Layout], Estimate],
    found: Mapping[Layout, Mapping[str, str]],
) -> Outcome:
    """The outcome of one layout, in a form that another process can read."""
    try:
        made = estimate(layout)
    except (LayoutError, ShardingError, ScheduleError) as error:
        return error
    return made, found.get(layout)
