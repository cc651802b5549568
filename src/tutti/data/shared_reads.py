"""Ranks of one host that read the same samples take turns: one reads a batch, the others copy it."""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

import tutti.errors
from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.failure import Wait, comm_error, now_seconds
from tutti.comm.collectives.group import Group, collective_timeout
from tutti.comm.host.publications import Publications
from tutti.comm.host.segment import SharedMemoryError, memory_host
from tutti.data.batch_frames import NotSendable, packed, unpacked
from tutti.data.collation import cut
from tutti.data.own_reads import Unread
from tutti.data.rank_rows import SPLIT_AXES, is_split, num_shares, rows
from tutti.data.read_cost import SampleCost, pays
from tutti.data.read_turns import Turn
from tutti.data.reading import Here
from tutti.data.same_data import LOOP
from tutti.data.sample_errors import ReadFailure, of_worker
from tutti.data.sample_order import BatchSpan
from tutti.errors import TuttiError
from tutti.layout import Layout
from tutti.torch_private.pytrees import tree_map
from tutti.user_lines import users_level

_WAIT = "the loader's shared read"


@dataclass(frozen=True)
class Terms:
    """What decides whether ranks share; the same on all of them but for the measured cost.

    Args:
        share: the user's word, if any.
        by_rows: a batch that ranks divide is read by rows.
        batch_size: the number of samples of a batch.
        odd: some batches do not divide.
        workers: others than the loop's process read.
        pin: the loop gets page-locked memory.
    """

    share: bool | None
    by_rows: bool
    batch_size: int
    odd: bool
    workers: bool
    pin: bool


class SharedReads:
    """The reads that this rank shares with others of its host.

    Ranks share the rows of a batch with those that differ in other axes than `replica` and `data`, and a
    whole batch with all ranks of their replica.

    Args:
        here: the layout that divides batches, and this rank.
        terms: of the loader.
        of_rows, of_whole: the groups that share rows and whole batches; None where this rank is alone.
    """

    def __init__(
        self,
        here: Here,
        terms: Terms,
        of_rows: Publications | None,
        of_whole: Publications | None,
    ) -> None:
        self._here, self._terms = here, terms
        self._of_rows, self._of_whole = of_rows, of_whole
        self._own: dict[int, dict[str, Any] | str] = {}  # of each group
        self.current: Wait | None = None

    def begin(self, position: Mapping[str, Any]) -> None:
        """Begin a loop at a position; the ranks of each group call this together."""
        self._own.clear()
        note = zlib.crc32(json.dumps(position).encode())
        for group in (self._of_rows, self._of_whole):
            if group is not None:
                with self._waiting(group):
                    group.begin(note)

    def group(self, span: BatchSpan) -> Publications | None:
        """The ranks that share the read of a batch."""
        size = span.stop - span.start
        by_rows = self._terms.by_rows and is_split(size, self._here.layout)
        return self._of_rows if by_rows else self._of_whole

    def publish(self, turn: Turn, answer: dict[str, Any]) -> None:
        """Give this rank's answer for one of its turns to the others, and keep it for the turn."""
        assert turn.group is not None
        problem = ""
        if "failure" in answer:
            said, parts = {"failure": _words_of(answer["failure"], turn.group)}, []
        else:
            try:
                said, parts = packed(answer["batch"])
            except NotSendable as found:
                problem = f"ranks do not send {found} to each other"
                said, parts = {"apart": problem}, []
        problem = turn.group.publish(json.dumps(said).encode(), parts) or problem
        self._own[id(turn.group)] = problem or answer

    def take(self, turn: Turn) -> dict[str, Any] | str:
        """The answer of a turn, whichever rank has read it; a text: why ranks cannot share it.

        Raises:
            CommError: the rank that reads it has gone, or does not come.
            NotSendable, SharedMemoryError: this rank alone cannot take it.
            RuntimeError: PyTorch interrupts the wait, as a worker of this rank has died; call again.
        """
        group = turn.group
        assert group is not None
        size = turn.span.stop - turn.span.start
        cuts = is_split(size, self._here.layout) and not self._terms.by_rows
        if turn.own:
            answer = self._own[id(group)]
            if isinstance(answer, str) or "failure" in answer or not cuts:
                return answer
            return self._cut(answer["batch"], size)
        with self._waiting(group):
            found = group.take(turn.number)
        if found is None:
            return "it does not fit into shared memory"
        said = json.loads(found.text)
        if "apart" in said:
            return said["apart"]
        if "failure" in said:
            return {"failure": _failure_of(said["failure"])}
        batch = unpacked(
            said,
            found.memory,
            in_place=lambda x: cuts and x.ndim > 0 and len(x) == size,
            pin=self._terms.pin,
        )
        return self._cut(batch, size) if cuts else {"batch": batch, "marks": None}

    @contextmanager
    def _waiting(self, group: Publications) -> Iterator[None]:
        """A wait for the other ranks of a group: its errors and reports name it."""
        self.current = Wait(_WAIT, (), 0, now_seconds())
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, SharedMemoryError) or of_worker(error):
                raise
            ranks = group.ranks
            here = Group.of(None, ranks, ranks[group.position])
            raise comm_error(error, _WAIT, (), 0, here) from error
        self.current = None

    def _cut(self, batch: Any, size: int) -> dict[str, Any]:
        """This rank's rows of a whole batch."""
        own = rows(size, self._here.layout, self._here.rank)
        batch, marks = cut(batch, size, own.start, own.stop)
        if self._terms.pin:
            batch = tree_map(lambda x: x.pin_memory() if isinstance(x, Tensor) else x, batch)
        return {"batch": batch, "marks": marks}


def shared_reads(here: Here, terms: Terms, cost: SampleCost | None) -> SharedReads | None:
    """The shared reads of this rank, if ranks share any; all ranks call this together, before a loop."""
    layout = here.layout
    mine = {"host": memory_host(here.rank), "pid": os.getpid(), "share": terms.share}
    mine |= {"workers": terms.workers, "cost": None if cost is None else asdict(cost)}

    def exchange(text: str) -> list[str]:
        return exchange_texts(text, Group.world(), LOOP)

    said = [json.loads(text) for text in exchange(json.dumps(mine))]
    if not _wanted(said, terms, layout):
        return None
    hosts = [x["host"] for x in said]
    of_rows = of_whole = None
    if terms.by_rows and num_shares(layout) > 1:
        of_rows = _made(_members(layout, hosts, SPLIT_AXES), here.rank, said, exchange)
    if not terms.by_rows or terms.odd or num_shares(layout) == 1:
        of_whole = _made(_members(layout, hosts, ("replica",)), here.rank, said, exchange)
    if of_rows is None and of_whole is None:
        return None
    return SharedReads(here, terms, of_rows, of_whole)


def _wanted(said: list[dict[str, Any]], terms: Terms, layout: Layout) -> bool:
    """Whether ranks share; the same on all ranks, which have all their terms."""
    if any(x["share"] is False or x["cost"] is None for x in said):
        return False
    costs = [SampleCost(**x["cost"]) for x in said]
    problem = next((x.problem for x in costs if x.problem), "")
    if all(x["share"] for x in said):
        if problem:
            warn_apart(f"ranks do not send {problem} to each other")
        return not problem
    num_rows = terms.batch_size
    if terms.by_rows and is_split(num_rows, layout):
        num_rows //= num_shares(layout)
    return not problem and all(x["workers"] for x in said) and pays(costs, num_rows)


def warn_apart(problem: str) -> None:
    """Warn that ranks read each for itself, though they were told to share."""
    if dist.get_rank() == 0:
        text = f"share_reads=True, but {problem}: each rank reads for itself"
        warnings.warn(text, stacklevel=users_level())


def _members(layout: Layout, hosts: list[str], axes: tuple[str, ...]) -> list[list[int]]:
    """The groups of ranks of one host that are at one place along some axes."""
    found: dict[Any, list[int]] = {}
    for rank, host in enumerate(hosts):
        place = layout.mesh.coordinates(rank)
        key = host, *(place[a] for a in axes if a in layout.mesh)
        found.setdefault(key, []).append(rank)
    return list(found.values())


def _made(
    groups: list[list[int]], rank: int, said: list[dict[str, Any]], exchange: Any
) -> Publications | None:
    """This rank's group; None where it is alone, or the group has no memory. All ranks call together."""
    if all(len(ranks) == 1 for ranks in groups):
        return None
    ranks = next(ranks for ranks in groups if rank in ranks)
    hosts = [x["host"] for x in said]

    def within(text: str) -> list[str]:
        texts = exchange(text)
        return [texts[r] for r in ranks]

    try:  # also where it is alone: all ranks take part in every exchange
        made = Publications(
            ranks,
            ranks.index(rank),
            [said[r]["pid"] for r in ranks],
            within,
            collective_timeout().total_seconds(),
            hosts.count(hosts[rank]),
        )
    except SharedMemoryError:
        return None
    return made if len(ranks) > 1 else None


def _words_of(failure: Unread, group: Publications) -> dict[str, str]:
    """A failure for the other ranks: those of samples as they are, any other one by its text."""
    if isinstance(failure, ReadFailure):
        error, trace = failure.error, failure.traceback()
    else:
        found = getattr(failure, "error", failure)
        rank = group.ranks[group.position]
        error = TuttiError(
            f"rank {rank} cannot read a batch: {type(found).__name__}: {found}",
            why="ranks of one host share the read",
            fix="repair it there; share_reads=False to read on each rank",
        )
        trace = ""
    words = {"what": error.what, "at": error.at, "why": error.why, "fix": error.fix}
    return {"class": type(error).__name__, "trace": trace, **words}


def _failure_of(said: dict[str, str]) -> ReadFailure:
    kind = getattr(tutti.errors, said["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, TuttiError)):
        kind = TuttiError
    error = kind(said["what"], at=said["at"], why=said["why"], fix=said["fix"])
    failure = ReadFailure(error, None)
    failure.text = said["trace"]
    return failure
