"""The memory of a loop over micro-batches at each entry of its row, beyond that held before it.

    held in an entry of the row  =  live values of micro-batches
                                 +  sums, and values to join
                                 +  the peak of the part itself

Blocks of memory count, not values: two values of a part may share a block, and a view of an input adds none.
A part may free an input after its last read, before the part ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from tutti.graph.analysis.part_memory import HeldMemory, PartMemory
from tutti.graph.analysis.storage import StorageBlock
from tutti.graph.ops.loop import RECEIVE, SEND, Body, Do, LoopPart


@dataclass(frozen=True)
class Peak:
    """The peak of a loop: its bytes, its node, its entry of the row, and the pieces held.

    `borrowed_nbytes` of the bytes are scratch memory, in no piece.
    """

    nbytes: int
    node: fx.Node
    do: Do
    pieces: tuple[HeldMemory, ...]
    borrowed_nbytes: int


class RowWalk:
    """Plays the row of a body as `playing.play` does, with pieces of memory for values."""

    def __init__(self, body: Body, memory_of: Callable[[LoopPart, bool], PartMemory]) -> None:
        self.body, self._memory_of = body, memory_of
        self.known: dict[tuple[int, bool], PartMemory] = {}  # by the part's id, and whether it adds
        self.live: defaultdict[tuple[int, int], dict[str, tuple[HeldMemory, ...]]] = defaultdict(
            dict
        )
        self.totals: dict[str, tuple[HeldMemory, ...]] = {}
        self.refs: Counter[HeldMemory] = Counter()
        self.now = 0
        self.best: Peak | None = None
        self.course: list[tuple[Do, fx.Node, int]] = []  # the peak of each part in turn
        self.ops = {s.name: s.op for s in body.sums}

    def peak(self) -> Peak | None:
        """The peak over all entries; None for an empty row."""
        body = self.body
        for do, part, dying in zip(body.row, body.played, body.last_reads, strict=True):
            if do.way == RECEIVE:
                self._receive(do)
            elif do.way == SEND:
                for name in body.messages.get((do.stage, do.kind, do.other), ()):
                    if name in dying:
                        self._drop(self._live(do, name).pop(name))
            elif part is not None and not part.is_empty:
                self._part(do, part, dying)
        return self.best

    def _receive(self, do: Do) -> None:
        for name in self.body.messages.get((do.other, do.kind, do.stage), ()):
            node = self._reader(do.stage, name)
            if node is not None:
                piece = HeldMemory(node, self.body.vals[name].nbytes)
                self._keep(self.live[do.stage, do.micro], name, (piece,))

    def _reader(self, stage: int, name: str) -> fx.Node | None:
        parts = (part for (s, _), part in self.body.parts.items() if s == stage)
        found = (self._of(part).inputs.get(name) for part in parts)
        return next((x for x in found if x is not None), None)

    def _part(self, do: Do, part: LoopPart, dying: frozenset[str]) -> None:
        memory = self._memory(part)
        handed = {n for _, names in self.body.near[do.stage, do.kind] for n in names}
        held = [n for n in memory.inputs if n in self._live(do, n)]
        known = {n: self._live(do, n)[n] for n in held}
        taken = {n: self._live(do, n).pop(n) for n in held if n in dying - handed}
        totals = {n: self.totals.pop(n) for n in part.totals}
        known, taken = known | totals, taken | totals
        results, sums, reduced = self._results(do, memory, known, taken)
        for name, pieces in results.items():
            self._keep(self._live(do, name), name, pieces)
        for name, pieces in reduced.items():
            self._keep(self.totals, name, pieces)
        for name, pieces in sums.items():
            if self.ops[name] == "join":
                self._keep(self.totals, f"{name} {do.micro}", pieces)
            elif name not in self.totals:
                self._keep(self.totals, name, pieces)
        for pieces in taken.values():
            self._drop(pieces)
        for other, names in self.body.near[do.stage, do.kind]:
            for name in names:
                self._keep(self.live[other, do.micro], name, self._live(do, name)[name])
        for name in handed & dying:
            self._drop(self._live(do, name).pop(name))

    def _memory(self, part: LoopPart) -> PartMemory:
        """The memory of a part, which adds to its totals if there are all."""
        added = part.summed[: part.num_added]
        if part.adding is None or not all(n in self.totals for n in added):
            return self._of(part)
        return self._of(part, adding=True)

    def _of(self, part: LoopPart, *, adding: bool = False) -> PartMemory:
        key = id(part), adding
        if key not in self.known:
            self.known[key] = self._memory_of(part, adding)
        return self.known[key]

    def _live(self, do: Do, name: str) -> dict[str, tuple[HeldMemory, ...]]:
        """The pieces by name in the scope of `name`: the micro-batch of `do`, or its stage as a whole."""
        return self.live[self.body.scope_of(do, name)]

    def _results(
        self,
        do: Do,
        memory: PartMemory,
        known: dict[str, tuple[HeldMemory, ...]],
        taken: dict[str, tuple[HeldMemory, ...]],
    ) -> tuple[dict[str, tuple[HeldMemory, ...]], ...]:
        """The pieces of a part's outputs, of its sums and of the totals that it makes; this part is the last
        reader of `taken`."""
        self._note(do, memory, self._given_back(memory, taken, known))
        made: dict[StorageBlock, HeldMemory] = {}
        return tuple(
            {n: self._pieces(memory, x, known, made, summed) for n, x in values.items()}
            for values, summed in (
                (memory.outputs, False),
                (memory.summed, True),
                (memory.reduced, True),
            )
        )

    def _given_back(
        self,
        memory: PartMemory,
        taken: dict[str, tuple[HeldMemory, ...]],
        known: dict[str, tuple[HeldMemory, ...]],
    ) -> dict[HeldMemory, frozenset[str]]:
        """The pieces of inputs that nothing else holds and no result aliases."""
        ends = {
            b
            for x in (*memory.outputs.values(), *memory.summed.values(), *memory.reduced.values())
            for b in memory.storages.of[x]
        }
        names: defaultdict[HeldMemory, set[str]] = defaultdict(set)
        for name, pieces in taken.items():
            for piece in pieces:
                names[piece].add(name)
        kept = {
            p
            for n, ps in known.items()
            if ends & set(memory.storages.of[memory.inputs[n]])
            for p in ps
        }
        return {
            piece: frozenset(n)
            for piece, n in names.items()
            if self.refs[piece] == len(n) and piece not in kept
        }

    def _pieces(
        self,
        memory: PartMemory,
        node: fx.Node,
        known: dict[str, tuple[HeldMemory, ...]],
        made: dict[StorageBlock, HeldMemory],
        summed: bool,
    ) -> tuple[HeldMemory, ...]:
        """The pieces of a result of a part: new memory, or that of an input."""
        found: dict[HeldMemory, None] = {}
        names = {x: n for n, x in memory.inputs.items()}
        for block in memory.storages.of[node]:
            if not memory.storages.is_given(block):
                piece = made.setdefault(block, HeldMemory(block.node, block.nbytes, summed))
                found[piece] = None
            elif block.node in names:
                found |= dict.fromkeys(known.get(names[block.node], ()))
        return tuple(found)

    def _note(
        self, do: Do, memory: PartMemory, given_back: dict[HeldMemory, frozenset[str]]
    ) -> None:
        more, node = memory.peak(given_back)
        self.course.append((do, node, self.now + more))
        if self.best is not None and self.now + more <= self.best.nbytes:
            return
        made, gone, borrowed = memory.held_at(node, given_back)
        summed = (*memory.summed.values(), *memory.reduced.values())
        sums = {b for x in summed for b in memory.storages.of[x]}
        pieces = [p for p in self.refs if p not in gone]
        pieces += [HeldMemory(b.node, b.nbytes, b in sums) for b in made]
        self.best = Peak(self.now + more, node, do, tuple(pieces), borrowed)

    def _keep(
        self, where: dict[str, tuple[HeldMemory, ...]], name: str, pieces: tuple[HeldMemory, ...]
    ) -> None:
        where[name] = pieces
        for piece in pieces:
            self.now += 0 if self.refs[piece] else piece.nbytes
            self.refs[piece] += 1

    def _drop(self, pieces: tuple[HeldMemory, ...]) -> None:
        for piece in pieces:
            self.refs[piece] -= 1
            if not self.refs[piece]:
                del self.refs[piece]
                self.now -= piece.nbytes
