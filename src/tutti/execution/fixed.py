"""Values with the same address at every call of a program: shared memory, and views of it.

Code generation makes their tensors once, so that a step does not make them again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from tutti.graph.analysis.aliases import aliased, written
from tutti.graph.ops import collectives
from tutti.graph.players.player import SharedMemory


class Fixed:
    """The fixed values of one graph.

    Args:
        memory: has the buffers; None if ranks share no memory.
        lodged: inputs, by name, that are always this tensor.
    """

    def __init__(self, memory: SharedMemory | None, lodged: Mapping[str, Tensor]) -> None:
        self._memory, self._lodged = memory, lodged
        self._known: dict[fx.Node, Tensor | None] = {}

    def of(self, node: fx.Node) -> Tensor | None:
        """The fixed tensor of `node`; None if it has none."""
        chain: list[fx.Node] = []  # may be longer than Python's recursion
        source: fx.Node | None = node
        while source is not None and source not in self._known:
            chain.append(source)
            source = aliased(source)
        for one in reversed(chain):
            self._known[one] = self._found(one)
        return self._known[node]

    def is_look(self, node: fx.Node) -> bool:
        """Whether `node` is fixed and computes nothing: a view, or one of several results."""
        looks = node.op == "call_function" and node.target is not collectives.buffer
        return looks and not written(node) and self.of(node) is not None

    def _found(self, node: fx.Node) -> Tensor | None:
        if node.op == "placeholder":
            return self._lodged.get(node.meta.get("name", ""))
        if node.op != "call_function":
            return None
        if node.target is collectives.buffer:
            given: Any = node.args
            return self._shared.buffer(*given)
        if node.target is operator.getitem:
            return self._result(*node.args)
        source = aliased(node)
        memory = None if source is None else self.of(source)
        if source is None or memory is None or source in written(node):
            return memory
        return self._view(node, memory)

    def _result(self, several: Any, index: Any) -> Tensor | None:
        """One result of a collective on values in shared memory."""
        if several.target is not collectives.together_:
            return None
        kind, xs, axes = several.args[:3]
        x = self.of(xs[index])
        if x is None or kind == "reduce_scatter":
            return None
        return self._shared.whole(x, axes) if kind == "all_gather" else x

    def _view(self, node: fx.Node, memory: Tensor) -> Tensor | None:
        """The tensor of a view; None for one that needs other values, and for a copy."""
        rest: Any = node.args[1:]
        if node.target is collectives.part:
            made = self._shared.part(memory, *rest)
        elif node.target is collectives.partialize or len(node.all_input_nodes) > 1:
            return None
        else:
            made = node.target(memory, *rest, **node.kwargs)  # type: ignore[operator]
        same = made.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        return made if same else None

    @property
    def _shared(self) -> SharedMemory:
        assert self._memory is not None, "a value in shared memory that the ranks do not have"
        return self._memory
