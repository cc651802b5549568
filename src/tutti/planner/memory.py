"""The most memory that one call of a program takes on each rank, predicted from its graph.

    held at a node  =  state, batch, constants              whoever calls holds these
                    +  what was made and is needed yet      by storage: views share, in-place ops reuse
                    +  what its kernel borrows

The graph is walked as it will run, after every pass. `graph.analysis.storage` finds what an op makes,
`graph.analysis.scratch` knows what it borrows, `graph.analysis.loop_memory` what a loop over micro-batches
holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from tutti.graph.analysis.liveness import last_holders, peak, peak_inside
from tutti.graph.analysis.part_memory import HeldMemory
from tutti.graph.analysis.scratch import borrowed
from tutti.graph.analysis.state import is_state
from tutti.graph.analysis.storage import StorageBlock, Storages
from tutti.graph.edits.edit import RECOMPUTED, source_of
from tutti.graph.ops.loop import loop
from tutti.graph.ops.matmul import is_faster
from tutti.graph.text import op_name
from tutti.partition.partition import Program
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed

# How many of the largest values at the peak are named.
NUM_LARGEST = 5


@dataclass(frozen=True)
class Held:
    """A value that is held at the peak: its name, local shape, bytes, kind and the user's line."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    source: str


@dataclass(frozen=True)
class PeakMemory:
    """Bytes that one rank holds at the peak of a call, where that is, and what the bytes are.

    `peak_nbytes` is the sum of the four kinds; `call_nbytes` of it come and go with the call.

    state_nbytes: parameters, buffers and slots, and new values of them that do not overwrite the old.
    gradient_nbytes: what the backward made and the update reads.
    activation_nbytes: what the forward made, or what was recomputed of it for the backward.
    other_nbytes: the batch, constants, what the backward and the update hold for a while, and what
        kernels borrow.
    largest: the largest values held at the peak that are not state.
    """

    peak_nbytes: int
    call_nbytes: int
    state_nbytes: int
    gradient_nbytes: int
    activation_nbytes: int
    other_nbytes: int
    op: str
    region: str
    source: str
    largest: tuple[Held, ...]


def predict(program: Program, graph: fx.Graph | None = None) -> PeakMemory:
    """The peak of one call of `program`, on the rank that holds most.

    `graph` is the program's graph as it is to run; by default after every pass of `passes.pass_table`, with
    all state that the step updates overwritten in place. Of a program that is yet to be split in time,
    the pipeline rank that holds most counts.
    """
    if graph is None and program.layout.in_time and not _has_loop(program.graph):
        return max(predict_pipe_ranks(in_time(program)), key=lambda memory: memory.peak_nbytes)
    if graph is None:
        donated = frozenset(program.captured.updated)
        graph = optimized(program, Target(donated=donated, onednn=is_faster()))
    storages = Storages(graph, program.captured.mode)
    at, call_nbytes = peak(graph, storages)
    kinds = _Kinds(graph, storages)
    inside = peak_inside(at, storages.mode)
    made = _live_at(at, graph, storages)
    live: list[StorageBlock | HeldMemory] = [*storages.given(), *made]
    if inside is not None:  # the sums that the loop returns are among the pieces
        live = [b for b in live if b.node is not at] + list(inside.pieces)
    nbytes: Counter[str] = Counter()
    for block in live:
        nbytes[kinds.of(block)] += block.nbytes
    nbytes["other"] += inside.borrowed_nbytes if inside else borrowed(at, storages)
    values = [b for b in live if kinds.of(b) != "state"]
    values.sort(key=lambda b: b.nbytes, reverse=True)
    where = f" in {inside.do}" if inside else ""
    at = inside.node if inside else at
    return PeakMemory(
        peak_nbytes=nbytes.total(),
        call_nbytes=call_nbytes,
        state_nbytes=nbytes["state"],
        gradient_nbytes=nbytes["gradient"],
        activation_nbytes=nbytes["activation"],
        other_nbytes=nbytes["other"],
        op=op_name(at) + where,
        region=at.meta.get("region", ""),
        source=source_of(at),
        largest=tuple(kinds.held(b) for b in values[:NUM_LARGEST]),
    )


def predict_pipe_ranks(made: Timed) -> list[PeakMemory]:
    """The peak of one call at each pipeline rank."""
    return [predict(one) for one in made.programs]


def _has_loop(graph: fx.Graph) -> bool:
    return any(node.target is loop for node in graph.nodes)


def _live_at(at: fx.Node, graph: fx.Graph, storages: Storages) -> Iterable[StorageBlock]:
    """The blocks that the call has made by `at` and not given back."""
    freed = last_holders(graph, storages)
    live: dict[StorageBlock, None] = {}
    for node in graph.nodes:
        live |= dict.fromkeys(storages.made(node))
        if node is at:
            return live
        for block in freed.get(node, ()):
            live.pop(block, None)
    raise AssertionError(f"{at} is not of this graph")


class _Kinds:
    """Which of the four kinds a block is, and how its value is called."""

    def __init__(self, graph: fx.Graph, storages: Storages) -> None:
        output = graph.output_node()
        both: Any = output.args[0]
        self.updates = {block for x in both[1] for block in storages.of[x]}
        self.ends = {b: n for n, dead in last_holders(graph, storages).items() for b in dead}
        self.values: dict[StorageBlock, fx.Node] = {}
        for node, blocks in storages.of.items():
            for block in blocks:
                if isinstance(node.meta.get("val"), Tensor):
                    self.values.setdefault(block, node)

    def of(self, block: StorageBlock | HeldMemory) -> str:
        node = block.node
        if isinstance(block, HeldMemory):
            return _kind_in_loop(block)
        if node.op != "call_function":
            return "state" if is_state(node) else "other"
        if block in self.updates:
            return "state"
        if node.meta.get("region") == "forward" or RECOMPUTED in node.meta:
            return "activation"
        return "gradient" if self._is_gradient(block) else "other"

    def _is_gradient(self, block: StorageBlock) -> bool:
        """Whether the backward made it, or a collective of what it made, and the update reads it."""
        moved = block.node.meta.get("value", block.node)
        end = self.ends.get(block)
        into_update = end is not None and end.meta.get("region") == "update"
        return into_update and moved.meta.get("region") == "backward"

    def held(self, block: StorageBlock | HeldMemory) -> Held:
        """The first value that lies in the block, in words."""
        node = block.node
        if isinstance(block, StorageBlock):
            node = self.values.get(block, node)
        val = node.meta.get("val")
        shape = tuple(val.shape) if isinstance(val, Tensor) else ()
        module = node.meta.get("module") or ""
        name = node.meta.get("name") or op_name(block.node) + (f" of {module}" if module else "")
        return Held(name, shape, block.nbytes, self.of(block), source_of(node))


def _kind_in_loop(piece: HeldMemory) -> str:
    region = piece.node.meta.get("region")
    if region == "forward" or RECOMPUTED in piece.node.meta:
        return "activation"
    return "gradient" if piece.summed and region == "backward" else "other"
