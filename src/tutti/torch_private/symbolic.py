"""Numbers as symbols of a trace: `torch.fx.experimental.symbolic_shapes`, and `torch._dynamo.source`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "ConstantSource",  # the name of a new symbol; public: none
    "DimDynamic",  # says that a symbol never becomes a number; public: none
    "GuardOnDataDependentSymNode",  # a branch on a number without a value; public: none
    "NumberEnv",
    "PythonPrinter",  # a condition on symbols as Python code; public: none
    "SymNode",  # the content of a `torch.SymBool`; public: none
    "expression_of",
    "function_of_symbol",
]

# `expression_of(x)`: the original sympy expression of a `SymInt`, `SymFloat` or `SymBool`: in
# `x.node.expr` a number replaces a symbol that a branch has found equal to it.
# Why: symbols name inputs and guards of a program. Public: none.
expression_of: Callable[[Any], Any] = attrgetter("node._expr")


class NumberEnv(ShapeEnv):
    """Keeps the symbols of a trace, and the conditions of its branches.

    Why: `_get_user_frame` is None for a stack of PyTorch's frames only, which fails an error's text. A branch
    on `x == 0` makes x the number 0 in all of the graph. Public: none.
    """

    def _get_user_frame(self) -> FrameType:
        return sys._getframe()  # any frame: an error of PyTorch 2.11 needs one

    def stays(self, symbol: Any) -> bool:
        """Whether a symbol stays itself where a branch has found it equal to something else.

        Else PyTorch takes nodes of the same value out of the graph.
        """
        return False

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        if not any(map(self.stays, (a, *tgt.free_symbols))):
            super()._set_replacement(a, tgt, msg)


def function_of_symbol(name: str) -> Callable[[Any], Any]:
    """The function `name` of `math`, as "log2", of a `SymFloat`.

    Why: a step may call `math` on an input number. Public: `torch.sym_sqrt` and its like, once they are
    documented.
    """
    return getattr(torch, f"_sym_{name}")
