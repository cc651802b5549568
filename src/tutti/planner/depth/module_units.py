"""The units of a model whose layers do not repeat: its modules, in the order of the forward.

    unet     down.0  down.1  middle  up.0  up.1           none has more than a share of the operations

A module with more than that is divided into its children.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

# No unit has more than this share of the forward's operations, unless it has no children.
_LARGEST = 1 / 32


class ModuleUnits:
    """The units of a captured step, by the names of its modules and parameters.

    Args:
        nodes: of the step's graph, in order.
    """

    # Whether an operation between two units belongs to the first of them.
    fills_gaps = True

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        names = [
            name
            for node in nodes
            if node.op == "call_function" and node.meta.get("region") == "forward"
            if (name := node.meta.get("module"))
        ]
        sizes = Counter(names)
        first = {name: i for i, name in reversed(list(enumerate(names)))}
        units = sorted(_units(sizes), key=lambda path: _begin(path, first))
        self._numbers = {path: i for i, path in enumerate(units)}
        # (units in the program, layers of a unit, layers of the model) of each run.
        self.runs = ((1, 1, 1),) * len(units)

    def of(self, name: str) -> tuple[int, int] | None:
        """The position of the unit, which is a run of one; None outside of all units."""
        while name:
            if name in self._numbers:
                return self._numbers[name], 0
            name = name.rpartition(".")[0]
        return None


def _units(sizes: Counter[str]) -> list[str]:
    """Paths of modules, none inside of another, with operations of their own or of their children."""
    most = _LARGEST * sizes.total()
    found: list[str] = []
    stack = [""]
    while stack:
        path = stack.pop()
        children = _children(path, sizes)
        within = sum(n for name, n in sizes.items() if _is_within(name, path))
        if children and (not path or within > most):
            stack += children
        elif path:
            found.append(path)
    return found


def _children(path: str, sizes: Counter[str]) -> list[str]:
    head = f"{path}." if path else ""
    names = (name[len(head) :] for name in sizes if name.startswith(head) and name != path)
    return [head + child for child in dict.fromkeys(name.partition(".")[0] for name in names)]


def _is_within(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _begin(path: str, first: dict[str, int]) -> int:
    return min(i for name, i in first.items() if _is_within(name, path))
