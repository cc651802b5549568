"""The peak of memory of one call of a program on each rank, predicted from its graph.

    held at a node  =  state, batch, constants              held by the caller
                    +  live values                          by storage: views share, in-place ops reuse
                    +  scratch memory of its kernel

It reads the final graph, after every pass. `graph.analysis.storage` gives the memory that an op allocates,
`graph.analysis.scratch` its scratch memory, `graph.analysis.loop_memory` that of a loop.
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
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import loop
from tutti.graph.text import op_name
from tutti.partition.partition import Program
from tutti.passes.pass_table import optimized
from tutti.pipeline.ready import in_time
from tutti.pipeline.targets import target_here
from tutti.pipeline.timed import Timed

# The number of largest values at the peak to name.
NUM_LARGEST = 5


@dataclass(frozen=True)
class Held:
    """A value held at the peak: its name, local shape, bytes, kind and the user's line.

    Buffers of several values in one block count as one, without a shape.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    source: str


@dataclass(frozen=True)
class PeakMemory:
    """The peak of a call in bytes on one rank, its position, and its kinds of bytes.

    `peak_nbytes` is the sum of the four kinds; `call_nbytes` is its part allocated and freed by the call.

    state_nbytes: parameters, buffers and slots, and their new values that do not overwrite the old.
    gradient_nbytes: results of the backward that the update reads.
    activation_nbytes: results of the forward, and their recomputation for the backward.
    other_nbytes: the batch, constants, intermediate values of the backward and the update, and scratch
        memory of kernels.
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
    """The peak of one call of `program`, on the rank with the highest one.

    `graph` is the program's final graph; by default that of a run on this host alone, whose ranks share
    memory. For a program before its split in time, the pipeline rank with the highest peak counts.
    """
    if graph is None and program.layout.in_time and not _has_loop(program.graph):
        return max(predict_pipe_ranks(in_time(program)), key=lambda memory: memory.peak_nbytes)
    if graph is None:
        graph = optimized(program, target_here(program))
    storages = Storages(graph, program.captured.mode)
    at, call_nbytes = peak(graph, storages)
    kinds = _Kinds(graph, storages)
    inside = peak_inside(at, storages.mode)
    made = _live_at(at, graph, storages)
    live: list[StorageBlock | HeldMemory] = [*storages.given(), *made]
    if inside is not None:  # the pieces include the sums that the loop returns
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
    """The blocks that the call has allocated by `at` and not freed."""
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
    """The kind of each block, of the four, and the name of its value."""

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
        buffers = [n for n in storages.of if n.target is collectives.buffer]
        self.num_buffers = Counter(block for n in buffers for block in storages.of[n])

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
        """Whether the update reads it, and the backward made it, directly or through a collective."""
        moved = block.node.meta.get("value", block.node)
        end = self.ends.get(block)
        into_update = end is not None and end.meta.get("region") == "update"
        return into_update and moved.meta.get("region") == "backward"

    def held(self, block: StorageBlock | HeldMemory) -> Held:
        """The first value in the block, in words."""
        node = block.node
        if isinstance(block, StorageBlock) and (num := self.num_buffers[block]) > 1:
            name = f"{num} buffers in shared memory"
            return Held(name, (), block.nbytes, self.of(block), source_of(node))
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
