"""What a loop over micro-batches holds while its row is played, beside what was held before it.

    held in an entry of the row  =  values of micro-batches that are under way
                                 +  sums, and values to be joined
                                 +  what the part itself holds at its peak

A value is counted by the memory it lies in: two values of a part may share it, and what a part only looks
at again of its inputs is nothing new. What a part reads for the last time it may give back on its way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx
from torch._subclasses import FakeTensorMode

from tutti.graph.loop import RECEIVE, SEND, Body, Do, Part
from tutti.graph.storage import Block, Storages


@dataclass(frozen=True, eq=False)
class Piece:
    """Memory that is held: what made it, its bytes, and whether it is a sum over the micro-batches."""

    node: fx.Node
    nbytes: int
    summed: bool = False


@dataclass(frozen=True)
class Peak:
    """The most that a loop holds: bytes, the node and the entry of the row at which, and the pieces.

    `borrowed_nbytes` of it no value lies in.
    """

    nbytes: int
    node: fx.Node
    do: Do
    pieces: tuple[Piece, ...]
    borrowed_nbytes: int


Borrowed = Callable[[fx.Node, Storages], int]
LastHolders = Callable[[fx.Graph, Storages], dict[fx.Node, list[Block]]]


class PartMemory:
    """The memory of one part: what it makes and gives back, node by node."""

    def __init__(
        self, part: Part, mode: FakeTensorMode, borrowed: Borrowed, last_holders: LastHolders
    ) -> None:
        self.part, self.storages = part, Storages(part.graph, mode)
        self._borrowed = borrowed
        self._freed = last_holders(part.graph, self.storages)
        inputs = [n for n in part.graph.nodes if n.op == "placeholder"]
        self.inputs = dict(zip(part.inputs, inputs, strict=True))
        output = part.graph.output_node()
        outputs, summed = output.args[0]  # type: ignore[misc]
        self.outputs: dict[str, fx.Node] = dict(zip(part.outputs, outputs, strict=True))  # type: ignore[arg-type]
        self.summed: dict[str, fx.Node] = dict(zip(part.summed, summed, strict=True))  # type: ignore[arg-type]
        self._known: dict[frozenset[frozenset[str]], tuple[int, fx.Node]] = {}

    @cached_property
    def _last_reads(self) -> dict[str, int]:
        """The place of the last node that reads an input, or looks at it through a view."""
        order = {n: i for i, n in enumerate(self.part.graph.nodes)}
        found: dict[str, int] = {}
        for name, node in self.inputs.items():
            own = set(self.storages.of[node])
            views = [n for n, blocks in self.storages.of.items() if own & set(blocks)]
            reads = (order[u] for n in views for u in n.users if u.op != "output")
            found[name] = max(reads, default=-1)
        return found

    def peak(self, given_back: dict[Piece, frozenset[str]]) -> tuple[int, fx.Node]:
        """The most bytes above those held when it begins, and where.

        given_back: what no one needs after it, each with the names under which the part reads it.
        """
        key = frozenset(given_back.values())
        if key not in self._known:
            steps = self._steps(given_back)
            self._known[key] = max(
                ((now, node) for node, now, _, _ in steps), key=lambda entry: entry[0]
            )
        return self._known[key]

    def held_at(
        self, at: fx.Node, given_back: dict[Piece, frozenset[str]]
    ) -> tuple[list[Block], set[Piece], int]:
        """At `at`: the blocks made and not given back, what is given back already, bytes borrowed."""
        for node, _, made, gone in self._steps(given_back):
            if node is at:
                return list(made), set(gone), self._borrowed(at, self.storages)
        raise AssertionError(f"{at} is not of this part")

    def _steps(
        self, given_back: dict[Piece, frozenset[str]]
    ) -> Iterator[tuple[fx.Node, int, dict[Block, None], set[Piece]]]:
        ends: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece, names in given_back.items():
            ends[max(self._last_reads[n] for n in names)].append(piece)
        now, made, gone = 0, dict[Block, None](), set[Piece]()
        for i, node in enumerate(self.part.graph.nodes):
            new = list(self.storages.made(node))
            made |= dict.fromkeys(new)
            now += sum(b.nbytes for b in new)
            yield node, now + self._borrowed(node, self.storages), made, gone
            for block in self._freed.get(node, ()):
                made.pop(block, None)
                now -= block.nbytes
            for piece in ends.get(i, ()):
                gone.add(piece)
                now -= piece.nbytes


class RowWalk:
    """Goes through the row of a body as `loop.play` does, with pieces of memory for values."""

    def __init__(self, body: Body, parts: dict[tuple[int, str], PartMemory]) -> None:
        self.body, self.parts = body, parts
        self.live: defaultdict[tuple[int, int], dict[str, tuple[Piece, ...]]] = defaultdict(dict)
        self.totals: dict[str, tuple[Piece, ...]] = {}
        self.refs: Counter[Piece] = Counter()
        self.now = 0
        self.best: Peak | None = None
        self.ops = {s.name: s.op for s in body.results}

    def peak(self) -> Peak | None:
        """The entry at which most is held; None where nothing is done."""
        for do, dying in zip(self.body.row, self.body.last_reads, strict=True):
            if do.way == RECEIVE:
                self._receive(do)
            elif do.way == SEND:
                for name in self.body.messages.get((do.stage, do.kind, do.other), ()):
                    if name in dying:
                        self._drop(self.live[do.stage, do.micro].pop(name))
            else:
                self._part(do, dying)
        return self.best

    def _receive(self, do: Do) -> None:
        for name in self.body.messages.get((do.other, do.kind, do.stage), ()):
            node = self._reader(do.stage, name)
            if node is not None:
                piece = Piece(node, self.body.vals[name].nbytes)
                self._keep(self.live[do.stage, do.micro], name, (piece,))

    def _reader(self, stage: int, name: str) -> fx.Node | None:
        found = (m.inputs.get(name) for (s, _), m in self.parts.items() if s == stage)
        return next((x for x in found if x is not None), None)

    def _part(self, do: Do, dying: frozenset[str]) -> None:
        memory = self.parts[do.stage, do.kind]
        if not memory.outputs and not memory.summed:
            return
        values = self.live[do.stage, do.micro]
        handed = {n for _, names in self.body.near[do.stage, do.kind] for n in names}
        taken = {n: values.pop(n) for n in memory.inputs if n in dying - handed and n in values}
        known = {n: values[n] for n in memory.inputs if n in values} | taken
        given_back = self._given_back(memory, taken, known)
        self._note(do, memory, given_back)
        made: dict[Block, Piece] = {}
        results = {n: self._pieces(memory, x, known, made) for n, x in memory.outputs.items()}
        sums = {n: self._pieces(memory, x, known, made, True) for n, x in memory.summed.items()}
        for name, pieces in results.items():
            self._keep(values, name, pieces)
        for name, pieces in sums.items():
            if self.ops[name] == "join":
                self._keep(self.totals, f"{name} {do.micro}", pieces)
            elif name not in self.totals:
                self._keep(self.totals, name, pieces)
        for pieces in taken.values():
            self._drop(pieces)
        for other, names in self.body.near[do.stage, do.kind]:
            for name in names:
                self._keep(self.live[other, do.micro], name, values[name])
        for name in handed & dying:
            self._drop(values.pop(name))

    def _given_back(
        self,
        memory: PartMemory,
        taken: dict[str, tuple[Piece, ...]],
        known: dict[str, tuple[Piece, ...]],
    ) -> dict[Piece, frozenset[str]]:
        """What lies in inputs that nobody else holds, and no result lies in."""
        ends = {
            b
            for x in (*memory.outputs.values(), *memory.summed.values())
            for b in memory.storages.of[x]
        }
        names: defaultdict[Piece, set[str]] = defaultdict(set)
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
        known: dict[str, tuple[Piece, ...]],
        made: dict[Block, Piece],
        summed: bool = False,
    ) -> tuple[Piece, ...]:
        """What a result of a part lies in: new memory, or that of an input."""
        found: dict[Piece, None] = {}
        names = {x: n for n, x in memory.inputs.items()}
        for block in memory.storages.of[node]:
            if not memory.storages.is_given(block):
                piece = made.setdefault(block, Piece(block.node, block.nbytes, summed))
                found[piece] = None
            elif block.node in names:
                found |= dict.fromkeys(known.get(names[block.node], ()))
        return tuple(found)

    def _note(self, do: Do, memory: PartMemory, given_back: dict[Piece, frozenset[str]]) -> None:
        more, node = memory.peak(given_back)
        if self.best is not None and self.now + more <= self.best.nbytes:
            return
        made, gone, borrowed = memory.held_at(node, given_back)
        sums = {b for x in memory.summed.values() for b in memory.storages.of[x]}
        pieces = [p for p in self.refs if p not in gone]
        pieces += [Piece(b.node, b.nbytes, b in sums) for b in made]
        self.best = Peak(self.now + more, node, do, tuple(pieces), borrowed)

    def _keep(
        self, where: dict[str, tuple[Piece, ...]], name: str, pieces: tuple[Piece, ...]
    ) -> None:
        where[name] = pieces
        for piece in pieces:
            self.now += 0 if self.refs[piece] else piece.nbytes
            self.refs[piece] += 1

    def _drop(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            self.refs[piece] -= 1
            if not self.refs[piece]:
                del self.refs[piece]
                self.now -= piece.nbytes
