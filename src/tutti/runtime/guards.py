"""What a trace takes for granted of the numbers that it is given: branches that it took."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._sympy.printers import PythonPrinter

from tutti.capture.step import Captured

# Whether a trace holds for numbers by name.
Guard = Callable[[Mapping[str, float]], bool]


def guard_of(captured: Captured) -> Guard:
    """One condition for all that a trace takes for granted."""
    # `_expr`: to PyTorch a symbol that a branch has compared with a number is that number from then on.
    symbols = {
        node.meta["val"].node._expr: name
        for name, node in captured.placeholders.items()
        if captured.kinds[name] in ("hyper", "number")
    }
    conditions: dict[str, None] = {}
    used: dict[Any, str] = {}
    for expr in captured.guards:
        known = expr.free_symbols & symbols.keys()
        if known and known != expr.free_symbols:
            return lambda given: False  # it holds for this call alone
        if known:
            conditions[f"({PythonPrinter().doprint(expr)})"] = None
            used |= {s: symbols[s] for s in expr.free_symbols}
    if not conditions:
        return lambda given: True
    names = list(used.values())
    text = f"lambda {', '.join(map(str, used))}: {' and '.join(conditions)}"
    holds = eval(text, {"math": math, "torch": torch})  # of PyTorch's own printing
    return lambda given: all(n in given for n in names) and holds(*(given[n] for n in names))
