"""`verify` for parameter servers: the sessions and machines of a run in this process, against one device.

    step             workers on virtual ranks, their         one device, whole batch
                     gradients summed at the servers
    async, bounded   workers in an order drawn at random,   one device that takes the same
                     at the weights that each pulled last   gradients in that order
    with after=N     both, one after the other

All in float64. One device takes a stale gradient by a separate graph: the captured step with its weights
twice, for the gradient and for the update (`replay.py`). With compressed gradients, the comparison is between
the workers' own and that of one device, whose update then takes the compressed ones (`emulated.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.capture.captured import Captured
from tutti.comm.collectives.compression import COMPRESSIONS
from tutti.graph.edits.promote import promoted, promoted_value
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.job import Job
from tutti.layout import Layout, Mesh
from tutti.partition.partition import Program
from tutti.replicas import replica_rows
from tutti.server.protocol import consistency
from tutti.server.protocol.keys import blocks
from tutti.server.protocol.update import WEIGHT
from tutti.server.protocol.virtual_servers import Gradients, VirtualServers
from tutti.server.split.origins import Origins
from tutti.server.split.program import in_slices, played, worker_layout, worker_program
from tutti.server.split.replay import STALE, given, stale
from tutti.server.split.three_parts import Split, split
from tutti.server.split.updater import GraphUpdater, check_same
from tutti.server.split.virtual_rows import rows_read
from tutti.server.split.worker_part import WorkerPart, alone, together
from tutti.verification.comparisons import (
    PARTITION_TOLERANCE,
    Errors,
    add_returned,
    add_state,
    check_dtype,
    feed_of,
    inputs_of,
)
from tutti.verification.emulated import CompressedSums
from tutti.verification.verdict import Subject, Verdict, rounding_of

# The least number of blocks if updates may be cut, unless blocks would be smaller than this.
_NUM_BLOCKS, _LEAST_NBYTES = 64, 512
Feed = dict[str, Any]
# A step captured for common updates, or for separate ones, and its feeds.
Phase = tuple[Subject, list[Feed]]


def compare_servers(job: Job, batch: tuple[Any, ...], *, steps: int, dtype: torch.dtype) -> Verdict:
    """Both comparisons for a layout with servers; workers have no stages to `cut`."""
    check_dtype(dtype)
    layout = job.layout
    due, count = consistency.parse(layout.sync), layout.num_replicas
    own = [replica_rows.of_batch(batch, w, count) for w in range(count)]
    rest: list[Phase] = []
    for batches in [own] if due.alone(0) else [[batch], own] if due.apart else [[batch]]:
        subject = Subject.of(job, batches[0], steps)
        rest.append((subject, [feed_of(subject.captured, job.optimizer, one) for one in batches]))
    return verdict_of(*rest[0], layout, then=rest[1] if due.both else None, place=job.place)


def verdict_of(
    subject: Subject,
    feeds: list[Feed],
    layout: Layout,
    *,
    then: Phase | None = None,
    place: Mapping[str, str] | None = None,
    spoil: Callable[[VirtualServers], None] | None = None,
) -> Verdict:
    """The verdict for a captured step.

    Args:
        subject: captured with the whole batch for common updates, else with the rows of worker 0.
        feeds: of that batch, or of each worker's rows.
        then: the same for as many steps with separate updates after those with common ones.
        place: as for `distribute`.
        spoil: called first with the servers (to inject faults).
    """
    phases = [(subject, feeds), *([then] if then is not None else [])]
    comparison = _compared(phases, layout, place, spoil)
    if not comparison.errors.worst <= PARTITION_TOLERANCE:
        plain, comparison = comparison, _compared(phases, layout, place, spoil, aligned=True)
        comparison.errors.apart = plain.errors
    found = comparison.errors
    captures = [(one.capture_errors, one.capture.tolerance) for one, _ in phases]
    captured = max((errors for errors, _ in captures), key=lambda errors: errors.worst)
    same = found.worst <= PARTITION_TOLERANCE
    return Verdict(
        ok=same and all(errors.worst <= tolerance for errors, tolerance in captures),
        layout=str(layout),
        steps=subject.steps * len(phases),
        num_tensors=found.count,
        max_error=found.worst,
        worst=found.name,
        capture_error=captured.worst,
        worst_capture=captured.name,
        staleness=comparison.staleness,
        **rounding_of(found, captured, same),
    )


def _compared(
    phases: list[Phase],
    layout: Layout,
    place: Mapping[str, str] | None,
    spoil: Callable[[VirtualServers], None] | None,
    *,
    aligned: bool = False,
) -> _Comparison:
    """The comparison; `aligned`: one device's updates take the workers' gradients (`aligned.py`)."""
    (subject, feeds), *later = phases
    made = split(subject.captured)
    due = consistency.parse(layout.sync)
    due = replace(due, after=subject.steps if later else 0)
    servers = _servers(subject, made, layout, due)
    if spoil is not None:
        spoil(servers)
    kind = _InAnyOrder if due.alone(0) else _Together
    comparison = kind(subject, made, servers, feeds, layout, place, aligned=aligned)
    comparison.run(subject.steps)
    for subject, feeds in later:
        tables = frozenset(v.name for v in servers.updater.variables if v.rows)
        made = split(subject.captured, tables=tables)
        check_same(GraphUpdater(made, wide=True), servers.updater)
        comparison = _InAnyOrder(
            *(subject, made, servers, feeds, layout, place), before=comparison, aligned=aligned
        )
        comparison.run(subject.steps)
    return comparison


def _servers(
    subject: Subject, made: Split, layout: Layout, due: consistency.Consistency
) -> VirtualServers:
    updater = GraphUpdater(made, wide=True)
    state: dict[str, dict[str, Tensor]] = {}
    for s in subject.captured.state:
        if s.owner or s.name in subject.captured.updated:
            own = state.setdefault(s.owner or s.name, {})
            own[s.slot or WEIGHT] = promoted_value(subject.start[s.name])
    nbytes = sum(x[WEIGHT].nbytes for x in state.values())
    return VirtualServers(
        updater,
        blocks(updater.variables, layout.server, nbytes=max(_LEAST_NBYTES, nbytes // _NUM_BLOCKS)),
        state,
        due,
        num_workers=layout.num_replicas,
        num_servers=layout.server,
    )


class _Comparison:
    """Servers and workers, and one device beside them.

    one: the device's state, by name.  held: each worker's own, its weights those of its last pull.
    before: the comparison whose servers, device and workers this one continues with.
    aligned: one device's updates take the workers' gradients, which this compares themselves.
    """

    def __init__(
        self,
        subject: Subject,
        made: Split,
        servers: VirtualServers,
        feeds: list[Feed],
        layout: Layout,
        place: Mapping[str, str] | None,
        *,
        before: _Comparison | None = None,
        aligned: bool = False,
    ) -> None:
        self.subject, self.servers, self.layout = subject, servers, layout
        side_by_side = isinstance(self, _Together)
        self.part: WorkerPart = (together if side_by_side else alone)(made)
        laid_out = worker_layout(layout, alone=not side_by_side)
        self.program = worker_program(self.part, laid_out, place)
        self.local = _as_run(self.program)
        self.captured, self.updater = made.captured, servers.updater
        self.feeds = [{n: promoted_value(x) for n, x in feed.items()} for feed in feeds]
        self.one = {n: promoted_value(x) for n, x in subject.start.items()}
        self.held = [dict(self.one) for _ in servers.sessions]
        self.names = {(s.owner or s.name, s.slot or WEIGHT): s.name for s in self.captured.state}
        self.whole = self.captured
        self.compressed = _compressed(made, servers, layout, together=side_by_side, always=aligned)
        if self.compressed is not None:
            self.whole = self.compressed.captured
        self.errors = Errors()
        self.staleness: int | None = None
        if before is not None:
            self.one, self.held, self.errors = before.one, before.held, before.errors
            if self.compressed is not None and before.compressed is not None:
                self.compressed.go_on(before.compressed)

    def run(self, steps: int) -> None:
        """Take `steps` steps, each compared."""
        raise NotImplementedError

    def pull(self, *workers: int) -> None:
        """Some workers pull concurrently."""
        for w, found in zip(workers, self.servers.pull(workers), strict=True):
            self.held[w] |= found

    def play(self, workers: Sequence[int], feeds: Sequence[Feed], seed: int, k: int) -> list[Any]:
        """The results of the ranks of some workers, from their worker's weights."""
        mesh, captured = self.program.layout.stage_mesh, self.program.captured
        inputs = []
        for rank in range(mesh.num_ranks):
            worker = rank // self.layout.worker_size
            held, at = self.held[workers[worker]], mesh.coordinates(rank)
            storage = {s.name: self.program.storage[s.name] for s in captured.state}
            own = {n: kept.cut(held[n], mesh, at) for n, kept in storage.items()}
            inputs.append(_cloned(inputs_of(captured, own, feeds[worker])))
        return VirtualRanks(mesh, seed=seed, step=k).run(*self.local, inputs)

    def keep(self, worker: int, new: list[Tensor], one: Mapping[str, Tensor], k: int) -> None:
        """Keep a worker's own state from one of its ranks, and one device's."""
        mine = dict(zip(self.program.captured.updated, new, strict=True))
        self.held[worker] |= mine
        add_state(self.errors, mine, one, k)

    def compare(self, k: int) -> None:
        """The servers' state with that of one device."""
        state = {
            self.names[variable, slot]: x
            for variable, slots in self.servers.state().items()
            for slot, x in slots.items()
        }
        add_state(self.errors, state, self.one, k)

    def arrived(self, pushed: Mapping[int, Gradients]) -> Feed:
        """One device's inputs for some workers' pushes."""
        return self.compressed.arrived(pushed) if self.compressed is not None else {}

    def returned(self, leaves: list[Any], k: int) -> list[Any]:
        """The step's own results, without those added here, on one device."""
        return (
            self.compressed.compare(self.errors, leaves, k)
            if self.compressed is not None
            else leaves
        )

    def numbers(self, known: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
        return {n: float(known[n]) for n in names}


class _Together(_Comparison):
    """`sync=step`: the workers' program on as many virtual ranks."""

    def __init__(self, subject: Subject, made: Split, *rest: Any, **options: Any) -> None:
        super().__init__(subject, made, *rest, **options)
        self.dense = promoted(self.whole.graph, self.whole.owner)[:2]

    def run(self, steps: int) -> None:
        workers, (feed,) = range(len(self.servers.sessions)), self.feeds
        for k in range(steps):
            self.pull(*workers)
            tables = [rows_read(self.part, x, feed) for x in self.held]
            outs = self.play(workers, [{**feed, **t.feed} for t in tables], self.subject.seed, k)
            found = [self.part.parts(returned) for returned, _ in outs]
            size, pushes = self.layout.worker_size, {}
            for w, (_, gradients, extra) in enumerate(found[::size]):
                numbers = self.numbers({**feed, **extra}, self.updater.given)
                pushes[w] = tables[w].pushed(gradients), numbers
            arrived = self.arrived({w: gradients for w, (gradients, _) in pushes.items()})
            self.servers.push(pushes)
            self.pull(*workers)
            numbers = self.servers.machines[0].ledger.numbers
            returned = self._one_device(k, {**feed, **arrived})
            for rank, ((own, _, _), (_, new)) in enumerate(zip(found, outs, strict=True)):
                leaves = self.part.result(own, numbers, wide=True)
                add_returned(self.errors, leaves, returned, k)
                self.keep(rank // size, new, self.one, k)
            for held in self.held:
                weights = [n for n in self.captured.updated if n in self.program.captured.kinds]
                add_state(self.errors, {n: held[n] for n in weights}, self.one, k)
            self.compare(k)

    def _one_device(self, k: int, feed: Feed) -> list[Any]:
        ranks = VirtualRanks(Mesh(), seed=self.subject.seed, step=k)
        inputs = [inputs_of(self.whole, self.one, feed)]
        returned, new = ranks.run(*self.dense, inputs)[0]
        self.one |= dict(zip(self.captured.updated, new, strict=True))
        return self.returned(returned, k)


class _InAnyOrder(_Comparison):
    """`async` and `bounded`: pulls and pushes in an order drawn at random, as far as permits go."""

    def __init__(self, subject: Subject, made: Split, *rest: Any, **options: Any) -> None:
        super().__init__(subject, made, *rest, **options)
        self.replay: Captured = stale(self.whole)
        self.dense = promoted(self.replay.graph, self.replay.owner)[:2]
        self.buffers = [dict(self.one) for _ in self.held]  # one device's, for each worker
        self.stale: dict[int, dict[str, Tensor]] = {}
        self.num_updates, self.seen = 0, dict[int, int]()  # all, and the number at a worker's pull
        self.before: dict[str, Tensor] = {}  # one device's weights before its last update

    def run(self, steps: int) -> None:
        order = random.Random(self.subject.seed)  # noqa: S311  # an order of workers, no secret
        count = len(self.servers.sessions)
        self.staleness, pushed = 0, [0] * count
        for w in range(count):
            self._pull(w)
        while min(pushed) < steps:
            free = [w for w in range(count) if w in self.stale or self.servers.permitted(w)]
            w = order.choice(free)
            if w in self.stale:
                self._push(w, pushed[w])
                pushed[w] += 1
            else:
                self._pull(w)

    def _pull(self, worker: int) -> None:
        self.pull(worker)
        weights = {n: self.one[n] for n, k in self.captured.kinds.items() if k == "parameter"}
        ledger = self.servers.machines[0].ledger
        if ledger.consistency.predict and self.before:
            ahead = ledger.lag + 1
            weights = {n: w + ahead * (w - self.before[n]) for n, w in weights.items()}
        self.stale[worker] = {STALE + n: w for n, w in weights.items()}
        self.seen[worker] = self.num_updates

    def _push(self, w: int, k: int) -> None:
        feed, seed = self.feeds[w], replica_rows.seed_of(self.subject.seed, w)
        tables = rows_read(self.part, self.held[w], feed)
        outs = self.play([w], [{**feed, **tables.feed}], seed, k)
        found = [self.part.parts(out) for out, _ in outs]
        own, gradients, extra = found[0]
        numbers = self.numbers({**feed, **extra}, self.updater.numbers)
        pushed = tables.pushed(gradients)
        arrived = self.arrived({w: pushed})
        (done,) = self.servers.push({w: (pushed, numbers)})
        self.staleness = max(self.staleness or 0, done.staleness)
        returned = self._one_device(w, k, seed, {**feed, **self._damped(w), **arrived})
        self.num_updates += 1
        for (own, _, _), (_, new) in zip(found, outs, strict=True):
            add_returned(self.errors, self.part.result(own, numbers), returned, k)
            self.keep(w, new, self.buffers[w], k)
        self.compare(k)

    def _damped(self, w: int) -> Feed:
        """The learning rates of an update with the worker's gradient, damped by its staleness."""
        age = max(1, self.num_updates - self.seen[w])
        rates = self.updater.rates if consistency.parse(self.layout.sync).damped else ()
        return {n: self.feeds[w][n] / age for n in rates}

    def _one_device(self, w: int, k: int, seed: int, feed: Feed) -> list[Any]:
        """One device's update with the worker's gradient; buffers are the worker's own."""
        kinds = self.captured.kinds
        own = {n: x for n, x in self.buffers[w].items() if kinds[n] == "buffer"}
        state = {**self.one, **own, **self.stale.pop(w)}
        inputs = [inputs_of(self.replay, state, feed)]
        returned, new = VirtualRanks(Mesh(), seed=seed, step=k).run(*self.dense, inputs)[0]
        self.before = dict(self.one)
        made = dict(zip(self.captured.updated, new, strict=True))
        self.buffers[w] |= {n: x for n, x in made.items() if kinds[n] == "buffer"}
        self.one |= {n: x for n, x in made.items() if kinds[n] != "buffer"}
        return self.returned(returned, k)


def _compressed(
    made: Split, servers: VirtualServers, layout: Layout, *, together: bool, always: bool
) -> CompressedSums | None:
    """The emulation of compressed gradients, if they are compressed, or `always`."""
    due = consistency.parse(layout.sync)
    if due.traffic not in COMPRESSIONS and not always:
        return None
    # a worker alone clips by the norm of its gradient as it was before it was compressed
    kept = () if together else Origins(made.captured).reductions
    captured = given(made.captured, {o.variable.name: o.gradient for o in made.owned}, kept=kept)
    return CompressedSums(due.traffic, servers.blocks, layout.num_replicas, captured)


def _as_run(program: Program) -> tuple[fx.Graph, nn.Module]:
    """A worker's executed program, in float64."""
    timed = in_slices(program)
    updated = frozenset(program.captured.updated)
    graph = played(timed.programs[0] if timed else program, updated)
    return promoted(graph, program.captured.owner)[:2]


def _cloned(inputs: list[Any]) -> list[Any]:
    """Copies of the tensors that a program may overwrite."""
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]
