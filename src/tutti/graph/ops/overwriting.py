"""Ops over lists of tensors, and the functions that write the same values over their operands.

    _foreach_add([%a, %b], 1)  ->  _foreach_add_([%a, %b], 1)

Unlike PyTorch's, these functions return the overwritten tensors, so that an item of the result is a value;
their `silent` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from tutti.graph.ops.fused_updates import BY_OP
from tutti.graph.ops.overloads import counterpart, name_of
from tutti.torch_private.op_tables import OpOverload, schema_of

FOREACH = "aten::_foreach_"


@dataclass(frozen=True)
class Lists:
    """The in-place form of an op over lists: the arguments that it overwrites, and its function.

    With `clones`, the pass first copies operands that must stay, since the op would copy all.
    """

    written: tuple[int, ...]
    function: Callable[..., list[Tensor]]
    clones: bool


@cache
def overwriting_lists(target: Any) -> Lists | None:
    """The in-place form of the op, or None."""
    if target in BY_OP:
        kernel = BY_OP[target]
        return Lists(kernel.written, kernel.overwriting, True)
    if not isinstance(target, OpOverload):
        return None
    if not schema_of(target).name.startswith(FOREACH):
        return None
    found = counterpart(target, f"{name_of(target)}_")
    return None if found is None else Lists((0,), _returning(found), False)


def _returning(op: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    def overwrite(xs: list[Tensor], *rest: Any, **options: Any) -> list[Tensor]:
        op(xs, *rest, **options)
        return xs

    overwrite.written = (0,)  # type: ignore[attr-defined]
    overwrite.silent = op  # type: ignore[attr-defined]
    overwrite.__name__ = str(op).removeprefix("aten.").removesuffix(".default")
    return overwrite
