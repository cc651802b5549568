"""Hooks of `torch.autograd.graph.register_multi_grad_hook(tensors, fn)` that wait for all gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

_MODULE = register_multi_grad_hook.__module__
_NAME = f"{register_multi_grad_hook.__name__}.<locals>"


def wait_for(hook: Any, x: Tensor) -> Callable[[], object]:
    """Let such a hook wait for the gradient of `x` in place of its own tensor's; returns what undoes it.

    Any other hook stays as it is.

    Why: the hook counts the gradients that a backward will compute by nodes of its own tensors. Public: none.
    """
    if not _waits(hook):
        return lambda: None
    cells = _cells(hook)
    nodes, at = cells["grad_fns"].cell_contents, cells["idx"].cell_contents
    before, nodes[at] = nodes[at], _node_of(x)

    def undo() -> None:
        nodes[at] = before

    return undo


def for_copy(hook: Any, x: Tensor, memo: dict[int, dict[str, CellType]]) -> Any:
    """A copy of such a hook for the copy `x` of its tensor; any other hook as it is.

    The hooks of one registration wait for each other's copies: they share `memo`.

    Why: as `wait_for`, while the hook of the original tensor stays. Public: none.
    """
    if not _waits(hook):
        return hook
    cells = _cells(hook)
    nodes = cells["grad_fns"].cell_contents
    if id(nodes) not in memo:
        memo[id(nodes)] = {name: CellType(cell.cell_contents) for name, cell in cells.items()}
        for name, value in (("grad_fns", [*nodes]), ("count", {}), ("buffer", {})):
            memo[id(nodes)][name].cell_contents = value
    own = memo[id(nodes)] | {"idx": cells["idx"]}
    code = hook.__code__
    closure = tuple(own[name] for name in code.co_freevars)
    made = FunctionType(code, hook.__globals__, hook.__name__, hook.__defaults__, closure)
    made.__qualname__, made.__module__ = hook.__qualname__, hook.__module__
    wait_for(made, x)
    return made


def _waits(hook: Any) -> bool:
    name = getattr(hook, "__qualname__", "")
    return getattr(hook, "__module__", "") == _MODULE and name.startswith(_NAME)


def _cells(hook: Any) -> dict[str, CellType]:
    return dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))


def _node_of(x: Tensor) -> Any:
    return x.grad_fn or x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
