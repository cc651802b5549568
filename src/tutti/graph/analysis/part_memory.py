"""The memory of one part of a loop, node by node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from tutti.graph.analysis.storage import StorageBlock, Storages
from tutti.graph.ops.loop import LoopPart
from tutti.torch_private.fake_tensors import FakeTensorMode


@dataclass(frozen=True, eq=False)
class HeldMemory:
    """A piece of held memory: its node, its bytes, and whether it is a sum over the micro-batches."""

    node: fx.Node
    nbytes: int
    summed: bool = False


Borrowed = Callable[[fx.Node, Storages], int]
LastHolders = Callable[[fx.Graph, Storages], dict[fx.Node, list[StorageBlock]]]


class PartMemory:
    """The memory that one part allocates and frees, node by node.

    `adding`: whether the part adds to existing totals. `inputs`, `outputs`, `summed`, `reduced`: the nodes of
    these values, by name; totals count as inputs.
    """

    def __init__(
        self,
        part: LoopPart,
        mode: FakeTensorMode,
        borrowed: Borrowed,
        last_holders: LastHolders,
        *,
        adding: bool = False,
    ) -> None:
        graph = part.adding if adding else part.graph
        assert graph is not None
        self.graph, self.storages = graph, Storages(graph, mode)
        self._borrowed = borrowed
        self._freed = last_holders(graph, self.storages)
        num_added = part.num_added if adding else 0
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        names = (*part.inputs, *part.totals, *part.summed[:num_added])
        self.inputs = dict(zip(names, inputs, strict=True))
        outputs, summed = graph.output_node().args[0]  # type: ignore[misc]
        count = len(part.outputs)
        self.outputs: dict[str, fx.Node] = dict(zip(part.outputs, outputs[:count], strict=True))  # type: ignore[arg-type,index]
        self.summed: dict[str, fx.Node] = dict(zip(part.summed[num_added:], summed, strict=True))  # type: ignore[arg-type]
        self.reduced: dict[str, fx.Node] = dict(zip(part.reduced, outputs[count:], strict=True))  # type: ignore[arg-type,index]
        self._known: dict[frozenset[frozenset[str]], tuple[int, fx.Node]] = {}

    @cached_property
    def _last_reads(self) -> dict[str, int]:
        """The position of the last node that reads an input, directly or through a view."""
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        found: dict[str, int] = {}
        for name, node in self.inputs.items():
            own = set(self.storages.of[node])
            views = [n for n, blocks in self.storages.of.items() if own & set(blocks)]
            reads = (order[u] for n in views for u in n.users if u.op != "output")
            found[name] = max(reads, default=-1)
        return found

    def peak(self, given_back: dict[HeldMemory, frozenset[str]]) -> tuple[int, fx.Node]:
        """The most bytes above those held when the part begins, and their node.

        given_back: pieces without a later reader, each with its names among the part's inputs.
        """
        key = frozenset(given_back.values())
        if key not in self._known:
            steps = self._steps(given_back)
            self._known[key] = max(
                ((now, node) for node, now, _, _ in steps), key=lambda entry: entry[0]
            )
        return self._known[key]

    def held_at(
        self, at: fx.Node, given_back: dict[HeldMemory, frozenset[str]]
    ) -> tuple[list[StorageBlock], set[HeldMemory], int]:
        """At `at`: the blocks made and not freed, the pieces freed already, the bytes of scratch memory."""
        for node, _, made, gone in self._steps(given_back):
            if node is at:
                return list(made), set(gone), self._borrowed(at, self.storages)
        raise AssertionError(f"{at} is not of this part")

    def _steps(
        self, given_back: dict[HeldMemory, frozenset[str]]
    ) -> Iterator[tuple[fx.Node, int, dict[StorageBlock, None], set[HeldMemory]]]:
        ends: defaultdict[int, list[HeldMemory]] = defaultdict(list)
        for piece, names in given_back.items():
            ends[max(self._last_reads[n] for n in names)].append(piece)
        now, made, gone = 0, dict[StorageBlock, None](), set[HeldMemory]()
        for i, node in enumerate(self.graph.nodes):
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
