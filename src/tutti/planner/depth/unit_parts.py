"""The parts of a unit of repeated layers, such as attention and perceptron.

    unit 0    norm attention + | norm perceptron +
    parts           0                  1

A part ends between two children where no more bytes cross than between two units: pipelines cut there, and
`remat=full` ends segments there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

from tutti.planner.depth.repeated_layers import ShortUnits

# A layer in its unit, and a child of that layer.
Child = tuple[int, str]
# How much more than between units may cross within one: masks, positions.
_SLACK = 1.01


class UnitParts:
    """The part of each node and name of the units of a program.

    Args:
        nodes: of forward and backward, in order.
        crossing: the bytes that cross right behind a node of the forward.
    """

    def __init__(
        self, nodes: Iterable[fx.Node], units: ShortUnits, crossing: Callable[[fx.Node], float]
    ) -> None:
        self.units = units
        inside = [n for n in nodes if units.of(n.meta.get("module") or "") is not None]
        self._parts: list[dict[Child, int]] = []
        for run in range(len(units.runs)):
            first = [n for n in inside if self._is_first(n, run)]
            self._parts.append(_parts(first, self._child, crossing))
        self._carried = self._carry(inside)

    def count(self, run: int) -> int:
        """The number of parts of a unit of a run."""
        return 1 + max(self._parts[run].values(), default=0)

    def of_name(self, name: str) -> int:
        """The part of a module or a parameter of a unit; 0 for a layer itself."""
        found = self.units.of(name)
        child = self.units.child(name)
        return 0 if found is None or child is None else self._parts[found[0]].get(child, 0)

    def of(self, node: fx.Node, name: str) -> int:
        """The part of a node whose module has this name: that of the child, or of the one before it."""
        return self._carried.get(node, 0) if self.units.child(name) is None else self.of_name(name)

    def _is_first(self, node: fx.Node, run: int) -> bool:
        forward = node.meta.get("region") == "forward"
        return forward and self.units.of(node.meta["module"]) == (run, 0)

    def _child(self, node: fx.Node) -> Child | None:
        return self.units.child(node.meta["module"])

    def _carry(self, inside: Iterable[fx.Node]) -> dict[fx.Node, int]:
        """The part of each node of a layer itself: that of the last child before it."""
        found: dict[fx.Node, int] = {}
        now: dict[object, int] = {}
        for node in inside:
            name, backward = node.meta["module"], node.meta.get("region") == "backward"
            unit = self.units.of(name)
            assert unit is not None
            if self._child(node) is not None:
                now[unit, backward] = self.of_name(name)
            found[node] = now.get((unit, backward), self.count(unit[0]) - 1 if backward else 0)
        return found


def _parts(
    nodes: Sequence[fx.Node],
    child: Callable[[fx.Node], Child | None],
    crossing: Callable[[fx.Node], float],
) -> dict[Child, int]:
    """The part of each child of a unit, by its nodes of the forward."""
    last = {c: i for i, node in enumerate(nodes) if (c := child(node)) is not None}
    first = {c: i for i, node in reversed(list(enumerate(nodes))) if (c := child(node)) is not None}
    order = sorted(first, key=first.__getitem__)
    most = _SLACK * crossing(nodes[-1]) if nodes else 0.0
    found, part = dict[Child, int](), 0
    for i, one in enumerate(order):
        found[one] = part
        ends = order[i + 1 :] and max(last[c] for c in order[: i + 1]) < first[order[i + 1]]
        # Behind the sum with the residual, which is of the layer itself.
        if ends and crossing(nodes[first[order[i + 1]] - 1]) <= most:
            part += 1
    return found
