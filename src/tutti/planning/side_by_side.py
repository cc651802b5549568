"""Estimates of many layouts in several processes, one for each processor; each takes whole groups.

Layouts of a group share work. Of a deep model those with the same model axes share placements and pieces, and
a process that has ended its group takes the next one. Of any other model those that differ in `schedule` and
`remat` only share a program, and each process has a part of the groups: kinds of several groups would have
their placement from whichever process came first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from tutti.errors import LayoutError, ScheduleError, ShardingError
from tutti.layout import Layout
from tutti.planner.depth.step_pieces import MODEL_AXES
from tutti.planner.estimates.layout_estimate import Estimate
from tutti.planner.placement.placement import AXES_FOUND

# A second process does not pay for fewer layouts. Each takes milliseconds if composed.
LEAST_COMPOSED, LEAST_LAYOUTS = 200, 24
_MOST_PROCESSES = 16
# Of a deep model: programs that a search for a placement writes for each axis that it splits weights over.
_PROGRAMS_OF_SEARCH = 15
_WIDTH = 2  # bytes of a group's number: a pipe holds 32,768 of them


class Estimated(NamedTuple):
    """An estimate that another process can read; its placement of least memory, if it has that one; and else
    the placement that it shares with layouts of the same axes."""

    estimate: Estimate
    smallest: Mapping[str, str] | None
    near: Mapping[str, Any]


# Of a layout: its estimate, or why the step does not allow it.
Outcome = Estimated | LayoutError | ShardingError | ScheduleError


def num_processes(layouts: Sequence[Layout], *, composed: bool) -> int:
    """How many processes should and may estimate them: a GPU in use does not survive a fork."""
    least = LEAST_COMPOSED if composed else LEAST_LAYOUTS
    return most_processes() if len(layouts) >= least else 1


def most_processes() -> int:
    """How many processes may estimate layouts: one for each processor, 1 where none may be forked."""
    if torch.cuda.is_initialized() or not hasattr(os, "sched_getaffinity"):
        return 1
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)


class SharedGroups:
    """Groups of layouts of a deep model, each with the same model axes, for several processes.

    Each process takes the next group when it has ended one, the group with most work first. Processes that
    are forked after the construction share the groups; one that dies keeps those that it has taken.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        found: dict[Any, list[Layout]] = {}
        for one in layouts:
            found.setdefault(_kind(one), []).append(one)
        self.groups = sorted(found.values(), key=_work, reverse=True)
        # A read takes a number whole, and no process can die with a lock.
        reading, writing = os.pipe()
        self._numbers = os.fdopen(reading, "rb", buffering=0)
        with os.fdopen(writing, "wb", buffering=0) as numbers:
            for number in range(len(self.groups)):
                numbers.write(number.to_bytes(_WIDTH))

    def taken(self) -> Iterator[Layout]:
        """The layouts of the groups that the calling process takes, in the order given."""
        while number := self._numbers.read(_WIDTH):
            yield from self.groups[int.from_bytes(number)]


def _work(group: Sequence[Layout]) -> int:
    """Programs to write for a group of a deep model: its pieces, and those of a search for each axis."""
    searched = sum(axis in AXES_FOUND for axis, _ in _kind(group[0]))
    return len(set(map(_piece, group))) + _PROGRAMS_OF_SEARCH * searched


def divided(layouts: Sequence[Layout], number: int) -> list[list[Layout]]:
    """At most so many parts of about equal work for a model that is not deep, each in the old order."""
    work: dict[Any, set[Layout]] = {}
    for one in layouts:
        work.setdefault(_sizes(one), set()).add(one)
    goes = _in_turn({k: len(x) for k, x in work.items()}, number)
    parts = [[one for one in layouts if goes[_sizes(one)] == i] for i in range(number)]
    return [part for part in parts if part]


def _in_turn(work: Mapping[Any, int], number: int) -> dict[Any, int]:
    """The part of each group, those of a kind side by side: most kinds are in one part only."""
    keys = sorted(work, key=lambda key: key[0])
    ends = accumulate(work[key] for key in keys)
    total = sum(work.values())
    return {
        key: int(number * (end - work[key] / 2) / total)
        for key, end in zip(keys, ends, strict=True)
    }


def _piece(layout: Layout) -> Any:
    return layout.axes.get("data", 1) * layout.micro, layout.precision


def _kind(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((a, n) for a, n in layout.axes.items() if a in MODEL_AXES)


def _sizes(layout: Layout) -> Any:
    return _kind(layout), tuple(layout.axes.items()), layout.micro, layout.precision


class OtherProcess:
    """A process that estimates some layouts by a copy of this one's estimates.

    Args:
        layouts: to estimate; the process asks for them one by one.
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
        args = (layouts, outcome, pieces, sending)
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
    torch.set_num_threads(1)  # the pool of threads did not survive the fork
    with contextlib.suppress(KeyboardInterrupt):  # the first process says it
        sending.send(({layout: outcome(layout) for layout in layouts}, pieces()))
    sending.close()


def outcome_of(
    layout: Layout,
    estimate: Callable[[Layout], Estimate],
    found: Mapping[Layout, Mapping[str, str]],
    near: Callable[[Layout], Mapping[str, Any]],
) -> Outcome:
    """The outcome of one layout, in a form that another process can read."""
    try:
        made = estimate(layout)
    except (LayoutError, ShardingError, ScheduleError) as error:
        return error
    return Estimated(made, found.get(layout), near(layout))
