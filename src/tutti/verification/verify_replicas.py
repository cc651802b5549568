"""`verify` for replicas: virtual ranks against one device a replica, with the strategy on both sides.

    replica 0   virtual ranks --+            one device --+
    replica 1   virtual ranks --+-- rounds   one device --+-- rounds       all in float64
                of each rank's shards                of whole weights

Each rank rounds its own compressed messages. So does the side of one device: for each rank's part of its
weights, by a separate emulation (`verification.emulated`).

The comparison omits the steps between rounds: the next rounds that begin or land follow each compared step,
at any distance in a run. It compares enough steps for every round of a period to land, and no fewer than
requested.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tutti.capture.captured import Captured
from tutti.capture.handed import arguments_of
from tutti.capture.step import capture
from tutti.comm.collectives.compression import COMPRESSIONS
from tutti.graph.edits.promote import promoted, promoted_value
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.job import Job
from tutti.layout import Mesh, assemble
from tutti.partition.partition import Program
from tutti.replicas import replica_rows, strategies
from tutti.replicas.average import Average
from tutti.replicas.strategy import AVERAGED, Strategy, Weights, check_dtypes
from tutti.replicas.virtual_replicas import Replicas
from tutti.state.agreeing import trained
from tutti.verification.blame import first_difference_of
from tutti.verification.comparisons import (
    PARTITION_TOLERANCE,
    Errors,
    check_dtype,
    feed_of,
    inputs_of,
    largest,
    largest_difference,
)
from tutti.verification.copies import copies_in_place
from tutti.verification.emulated import CompressedReplicas
from tutti.verification.verdict import Subject, Verdict, rounding_of

Feed = dict[str, Any]


def compare_replicas(
    job: Job,
    batch: tuple[Any, ...],
    *,
    steps: int,
    dtype: torch.dtype,
    strategy: Strategy | None = None,
) -> Verdict:
    """Both comparisons for a layout with replicas; `strategy` replaces the layout's on the virtual ranks
    (to inject faults)."""
    check_dtype(dtype)
    layout, count = job.layout, job.layout.num_replicas
    due = strategies.parse(layout.sync)
    batches = [replica_rows.of_batch(batch, r, count) for r in range(count)]
    subject = Subject.of(job, batches[0], steps)
    updated = subject.captured.updated
    agreed = {s.name: s.tensor for s in trained(job.model, job.optimizer, updated)}
    check_dtypes(due, agreed)
    feeds = [feed_of(subject.captured, job.optimizer, own) for own in batches]
    program = subject.program(layout, job.place)
    given = subject, program, feeds, list(agreed), due, strategy or due, job.cut
    comparison = ReplicaComparison(*given)
    if isinstance(due, Average) and due.every == 1:
        with copies_in_place(*job.trained, arguments_of(batch)) as copies:
            whole = capture(*copies, batch, precision=layout.precision)
            feed = feed_of(whole, copies[-1], batch)
        comparison.data = _OneDevice(whole, subject.start, feed, job.seed)
    comparison.run(steps)
    if not comparison.errors.worst <= PARTITION_TOLERANCE:
        closer = ReplicaComparison(*given, aligned=True)
        closer.run(steps)
        closer.data, closer.errors.apart = comparison.data, comparison.errors
        comparison = closer
    return _verdict(subject, program, comparison, feeds[0])


def _verdict(subject: Subject, program: Program, found: ReplicaComparison, feed: Feed) -> Verdict:
    partition, captured = found.errors, subject.capture_errors
    same = partition.worst <= PARTITION_TOLERANCE
    first = None
    if not same:
        first = first_difference_of(program, subject.start, feed, subject.seed, subject.steps)
    return Verdict(
        ok=same and captured.worst <= subject.capture.tolerance,
        layout=str(program.layout),
        steps=len(found.visits(subject.steps)),
        num_tensors=partition.count,
        max_error=partition.worst,
        worst=partition.name,
        capture_error=captured.worst,
        worst_capture=captured.name,
        first_difference=first,
        data_error=found.data.errors.worst if found.data is not None else None,
        **rounding_of(partition, captured, same),
    )


class ReplicaComparison:
    """Every replica's program and its rounds, on virtual ranks and on one device a replica.

    Args:
        subject: captured with the rows of replica 0; those of others have the same shapes.
        feeds: hyper-parameters and batch of each replica.
        names: the weights that replicas exchange.
        strategy: for the whole weights.
        ours: for the shards.
        cut: where the stages of a pipeline begin.
        aligned: each replica part by part, as in `verification.aligned`.
    """

    def __init__(
        self,
        subject: Subject,
        program: Program,
        feeds: list[Feed],
        names: list[str],
        strategy: Strategy,
        ours: Strategy,
        cut: Sequence[str] = (),
        *,
        aligned: bool = False,
    ) -> None:
        self.strategy = strategy
        self.data: _OneDevice | None = None
        play = partial(subject.played, cut=cut)
        self.parts = [
            subject.comparison(
                program, play, feed, replica_rows.seed_of(subject.seed, r), aligned=aligned
            )
            for r, feed in enumerate(feeds)
        ]
        state = [s for s in subject.captured.state if s.tensor.dtype in AVERAGED]
        self.names, self.buffers = names, [s.name for s in state if s.kind == "buffer"]
        self.errors = self.parts[0].errors
        for part in self.parts:
            part.errors = self.errors
        # One for each virtual rank, and one on whole weights, or on parts with compression.
        self._held = [[part.many[p][r] for part in self.parts] for p, r in self._ranks]
        self._ours = [self._begun(Replicas, ours, held) for held in self._held]
        if strategy.compression in COMPRESSIONS:
            self._one = [self._begun(CompressedReplicas, strategy, x) for x in self._cut()]
        else:
            whole = [part.one for part in self.parts]
            self._one = [self._begun(Replicas, strategy, whole)]

    def run(self, steps: int) -> None:
        """Take `steps` steps or more, each followed by the next rounds."""
        for k, passed in enumerate(self.visits(steps)):
            for part in self.parts:
                part.advance(k)
            for step in passed:
                self._agree(step)
            for part in self.parts:
                part.compare_state(k)
            if self.data is not None:
                self.data.compare(k, self.parts[0].one, self.names)

    def visits(self, steps: int) -> list[range]:
        """The steps of a run that each compared step stands for: up to the next rounds."""
        strategy, found = self.strategy, list[range]()
        first = begin = strategy.warm_up + 1
        until = first + strategy.period + strategy.longest_delay
        landing: set[int] = set()
        for step in itertools.count(first):
            landing |= {due.lands for due in strategy.rounds(step, len(self.parts))}
            if strategy.rounds(step, len(self.parts)) or step in landing:
                found.append(range(begin, step + 1))
                begin = step + 1
            if step + 1 >= until and len(found) >= steps:
                return found
        raise AssertionError("a count has no end")

    @property
    def _ranks(self) -> list[tuple[int, int]]:
        """The virtual ranks of a replica, by pipeline rank and number there."""
        return [(p, r) for p, ranks in enumerate(self.parts[0].many) for r in range(len(ranks))]

    def _begun(
        self, kind: type[Replicas], strategy: Strategy, held: list[dict[str, Tensor]]
    ) -> Replicas:
        return kind(strategy, self.names, [self._of(x, self.names) for x in held])

    def _agree(self, step: int) -> None:
        for replicas, held in zip(self._ours, self._held, strict=True):
            for state, new in zip(held, self._after(replicas, step, held), strict=True):
                state |= new
        compressed = self.strategy.compression in COMPRESSIONS
        held = self._cut() if compressed else [[part.one for part in self.parts]]
        new = [self._after(one, step, x) for one, x in zip(self._one, held, strict=True)]
        for i, part in enumerate(self.parts):
            part.one |= self._joined([of[i] for of in new]) if compressed else new[0][i]

    def _after(self, replicas: Replicas, step: int, held: list[dict[str, Tensor]]) -> list[Weights]:
        weights = [self._of(x, self.names) for x in held]
        buffers = [self._of(x, self.buffers) for x in held]
        return replicas.after(step, weights, buffers)

    def _cut(self) -> list[list[dict[str, Tensor]]]:
        """One device's weights and buffers, each virtual rank's part of them; for each rank, by replica."""
        program, mesh = self.parts[0].program, self.parts[0].mesh
        return [
            [
                {
                    n: program.storage[n].cut(part.one[n], mesh, mesh.coordinates(r)).clone()
                    for n in (*self.names, *self.buffers)
                    if n in part.many[p][r]
                }
                for part in self.parts
            ]
            for p, r in self._ranks
        ]

    def _joined(self, parts: list[Weights]) -> Weights:
        """Whole tensors from each virtual rank's parts."""
        program, mesh = self.parts[0].program, self.parts[0].mesh
        found: Weights = {}
        for begin in range(0, len(parts), mesh.num_ranks):
            own = parts[begin : begin + mesh.num_ranks]
            found |= {n: assemble([x[n] for x in own], program.storage[n], mesh) for n in own[0]}
        return found

    def _of(self, state: dict[str, Tensor], names: list[str]) -> Weights:
        return {n: state[n] for n in names if n in state}


class _OneDevice:
    """One program on the whole batch, which replicas with an average after every step may equal."""

    def __init__(self, captured: Captured, start: dict[str, Tensor], feed: Feed, seed: int) -> None:
        self.captured, self.seed = captured, seed
        self.feed = {n: promoted_value(x) for n, x in feed.items()}
        self.state = {n: promoted_value(x) for n, x in start.items()}
        self._dense = promoted(captured.graph, captured.owner)[:2]
        self.errors = Errors()

    def compare(self, k: int, state: Mapping[str, Tensor], names: list[str]) -> None:
        """Take step `k`, and compare the weights `names` of `state` with its own."""
        inputs = [inputs_of(self.captured, self.state, self.feed)]
        new = VirtualRanks(Mesh(), seed=self.seed, step=k).run(*self._dense, inputs)[0][1]
        self.state |= dict(zip(self.captured.updated, new, strict=True))
        scale = max((largest(self.state[n]) for n in names), default=0.0)
        for n in names:
            self.errors.add(n, largest_difference(state[n], self.state[n]), scale)
