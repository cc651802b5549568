"""A final graph on a clock: the device's kernels in order, and the links beside them.

    device   |kernel|kernel|kernel|  wait  |kernel|
    link            |====== gather ======|
                    start                 finish

A collective with a start and a finish takes its link from the start on, after earlier ones on that link; any
other makes the device wait. Kernels beside a collective in flight take `OVERLAP_SLOWDOWN` as long: both use
the same memory and processors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tutti.costs.collective_seconds import collective_seconds, sent_nbytes
from tutti.costs.graph_seconds import CollectiveCall, collective_call
from tutti.costs.kernel_seconds import LAUNCHES
from tutti.costs.rank_groups import RankGroups
from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import REDUCE, Body, LoopPart, loop
from tutti.graph.text import op_name
from tutti.planner.estimates.priced_machine import PricedKernels, PricedMachine

# Of compute beside communication, measured on A100s: Galvatron-2's profile.
OVERLAP_SLOWDOWN = 1.126
# Kinds of seconds.
COMPUTE, COLLECTIVES, MESSAGES, IDLE = "compute", "collectives", "messages", "idle"
# Of ranks that wait for a processor, because there are more ranks than processors.
SHARED = "shared processors"
_LEAST_SECONDS = 1e-9
# A stream of messages; the pipeline rank that receives them follows.
MESSAGE_STREAM = "to "


def without_rounding(seconds: float) -> float:
    """0 for less than a nanosecond: sums of costs in another order differ by as much as 1e-18 s."""
    return seconds if seconds >= _LEAST_SECONDS else 0.0


def kinds_of(kinds: Mapping[str, float]) -> dict[str, float]:
    """Those that take time."""
    return {kind: seconds for kind, seconds in kinds.items() if without_rounding(seconds)}


@dataclass(frozen=True)
class TraceEvent:
    """A kernel, a collective or a message on the clock.

    name: of the op, the kind of a collective, or the words of a message. stream: `device`; of a collective
    its link, `inside` or `between`; of a message `to N`, the pipeline rank that receives it. start, seconds:
    from the start of the step. source: the user's line. nbytes: moved by a collective or a message, else 0.
    group: ranks of a collective. dtypes: of its values. reduction: as in `CollectiveCall`.
    """

    name: str
    stream: str
    start: float
    seconds: float
    source: str = ""
    region: str = ""
    nbytes: int = 0
    group: int = 1
    dtypes: tuple[torch.dtype, ...] = ()
    reduction: str = ""

    def later(self, seconds: float) -> TraceEvent:
        """The same event, later."""
        return replace(self, start=self.start + seconds)


@dataclass
class Playback:
    """What a graph takes: `seconds` in all and by kind, and bytes by link.

    limits: seconds of compute by what they are for, where that is known.
    hidden_seconds: of collectives beside kernels. nbytes: sent by each rank, `inside` its host and `between`.
    events: in order, if the clock records them. open_seconds: of collectives that another graph ends, behind
    the end of this one.
    """

    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    hidden_seconds: float = 0.0
    nbytes: Counter[str] = field(default_factory=Counter)
    events: list[TraceEvent] = field(default_factory=list)
    open_seconds: float = 0.0

    def add(self, other: Playback) -> None:
        """`other` after this one."""
        self.events += [event.later(self.seconds) for event in other.events]
        self.seconds += other.seconds
        self.hidden_seconds += other.hidden_seconds
        self.kinds.update(other.kinds)
        self.limits.update(other.limits)
        self.nbytes.update(other.nbytes)


class GraphClock:
    """Plays the graphs of one rank on a machine. `records`: its playbacks have events."""

    def __init__(
        self, machine: PricedMachine, groups: RankGroups, *, records: bool = False
    ) -> None:
        self.machine, self.groups, self.records = machine, groups, records
        self._known: dict[fx.Graph, Playback] = {}

    def play(self, graph: fx.Graph) -> tuple[Playback, Playback, Playback]:
        """The parts of a graph before, in and after its main loop; without a loop all of it is before."""
        priced = self.machine.kernels(graph)
        parts = [Playback(), Playback(), Playback()]
        main, at, streams = main_loop(graph), 0, _Streams(self)
        for node in graph.nodes:
            if node.target is loop:
                parts[at].add(streams.ended())
                streams = _Streams(self)
                at = 1 if node is main else at
                parts[at].add(self.in_loop(body_of(node)))
                at = 2 if node is main else at
            else:
                streams.play(node, priced)
        parts[at].add(streams.ended())
        return parts[0], parts[1], parts[2]

    def whole(self, graph: fx.Graph) -> Playback:
        """All of it, one after the other; a graph is played once."""
        if graph not in self._known:
            total = Playback()
            for part in self.play(graph):
                total.add(part)
            self._known[graph] = total
        return self._known[graph]

    def in_loop(self, body: Body) -> Playback:
        """The row of a rank on its own: a step in micro-batches without a pipeline."""
        total = Playback()
        for part in body.played:
            if part is not None:
                total.add(self.whole(_graph(part)))
        return total

    def parts(self, body: Body) -> dict[tuple[int, str], Playback]:
        """Each part of a body, once; one that adds to sums counts as adding.

        The reductions of a stage in its last backward are the time that they add to it.
        """
        found = {key: self.whole(_graph(part)) for key, part in body.parts.items()}
        for key, part in body.last.items():
            found[key[0], REDUCE] = _more(found[key], self.whole(_graph(part)))
        return found

    def seconds_of(self, call: CollectiveCall) -> float:
        """Of one collective."""
        return collective_seconds(
            call.kind, call.nbytes, self.groups[call.axes], self.machine.topology
        )

    @property
    def message_link(self) -> str:
        """The link of messages between pipeline ranks."""
        return "between" if self.groups.crosses_hosts("pipe") else "inside"

    def message(self, nbytes: float) -> float:
        """Seconds of a message to the next pipeline rank."""
        return self.machine.message(nbytes, across_hosts=self.groups.crosses_hosts("pipe"))


class _Streams:
    """The device and its links while a graph plays."""

    def __init__(self, owner: GraphClock) -> None:
        self.owner, self.total = owner, Playback()
        self.now = 0.0
        self.free: defaultdict[str, float] = defaultdict(float)
        self.ends: dict[fx.Node, float] = {}

    def play(self, node: fx.Node, priced: PricedKernels) -> None:
        if node in priced.seconds:
            self._compute(node, priced.seconds[node], priced.limits.get(node))
        elif node.target is collectives.finish:
            # One that began before a loop has ended with the streams before it.
            self._wait(self.ends.get(node.args[0], 0.0), COLLECTIVES)  # type: ignore[arg-type]
        elif node.target is collectives.send:
            nbytes = _nbytes(node.args[0])  # type: ignore[arg-type]
            end = self.now + self.owner.message(nbytes)
            self.total.nbytes[self.owner.message_link] += nbytes
            self._note(
                node, "send", message_stream(node.args[2]), self.now, end, nbytes=nbytes, group=2
            )
            self._wait(end, MESSAGES)
        elif (call := collective_call(node)) is not None:
            self._collective(call)

    def ended(self) -> Playback:
        """The whole, when the last collective has ended, too, unless another graph ends it."""
        end = max(self.free.values(), default=0.0)
        if any(all(u.op == "output" for u in node.users) for node in self.ends):
            self.total.open_seconds = max(0.0, end - self.now)
        else:
            self._wait(end, COLLECTIVES)
        self.total.seconds = self.now
        return self.total

    def _note(
        self, node: fx.Node, name: str, stream: str, start: float, end: float, **shown: Any
    ) -> None:
        if self.owner.records:
            region = node.meta.get("region") or ""
            event = TraceEvent(name, stream, start, end - start, source_of(node), region, **shown)
            self.total.events.append(event)

    def _compute(self, node: fx.Node, seconds: float, limit: str | None) -> None:
        begin, busy = self.now, max(self.free.values(), default=0.0) - self.now
        if busy > 0:
            beside = min(seconds * OVERLAP_SLOWDOWN, busy)
            seconds = beside + (seconds - beside / OVERLAP_SLOWDOWN)
            self.total.hidden_seconds += beside
        self.now += seconds
        self.total.kinds[COMPUTE] += seconds  # type: ignore[assignment]
        if limit is not None:
            self.total.limits[limit] += seconds  # type: ignore[assignment]
        self._note(node, op_name(node), "device", begin, self.now)

    def _wait(self, until: float, kind: str) -> None:
        self.total.kinds[kind] += max(0.0, until - self.now)  # type: ignore[assignment]
        self.now = max(self.now, until)

    def _collective(self, call: CollectiveCall) -> None:
        group = self.owner.groups[call.axes]
        if group.size == 1:
            return
        if call.node.target is collectives.together_ and call.kind == "all_gather":
            call = replace(call, nbytes=0)  # views of memory that the ranks share
        link = "inside" if group.num_hosts == 1 else "between"
        sent = sent_nbytes(call.kind, call.nbytes, group)
        for level, nbytes in zip(("inside", "between"), sent, strict=True):
            self.total.nbytes[level] += int(nbytes)
        host = self.owner.machine.launch_seconds
        self.now += host
        self.total.kinds[COMPUTE] += host  # type: ignore[assignment]
        self.total.limits[LAUNCHES] += host  # type: ignore[assignment]
        begin = max(self.now, self.free[link])
        end = begin + self.owner.seconds_of(call)
        self.free[link] = end
        shown = {"dtypes": call.dtypes, "reduction": call.reduction}
        self._note(
            call.node, call.kind, link, begin, end, nbytes=call.nbytes, group=group.size, **shown
        )
        if call.node.target is collectives.start:
            self.ends[call.node] = end
        else:
            self._wait(end, COLLECTIVES)


def _nbytes(values: list[fx.Node]) -> int:
    return sum(x.meta["val"].nbytes for x in values)


def _graph(part: LoopPart) -> fx.Graph:
    return part.graph if part.adding is None else part.adding


def _more(before: Playback, last: Playback) -> Playback:
    """What `last`, a part with reductions, takes more than `before`, the same part without.

    Its events are those of `last` as a whole, which begins with `before`: collectives begin beside that part.
    """
    return Playback(
        seconds=max(0.0, last.seconds - before.seconds),
        kinds=last.kinds - before.kinds,
        limits=last.limits - before.limits,
        hidden_seconds=max(0.0, last.hidden_seconds - before.hidden_seconds),
        nbytes=last.nbytes - before.nbytes,
        events=[event.later(-before.seconds) for event in last.events],
        open_seconds=last.open_seconds,
    )


def message_stream(to: object) -> str:
    """The stream of messages to a pipeline rank: in order among themselves, beside those to others and beside
    collectives."""
    return f"{MESSAGE_STREAM}{to}"


def body_of(node: fx.Node) -> Body:
    """The body of a loop."""
    body = node.args[0]
    assert isinstance(body, Body), node
    return body


def main_loop(graph: fx.Graph) -> fx.Node | None:
    """The loop with the stages, beside short ones that compute values of the batch beforehand."""
    loops = [node for node in graph.nodes if node.target is loop]
    return max(loops, key=lambda node: len(body_of(node).parts), default=None)
