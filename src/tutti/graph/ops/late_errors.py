"""Arithmetic on plain numbers whose errors count only if the run does.

A program with branches on values of tensors goes the way of its trace. A check after the run, when the values
are known, tells whether they lead there. In `if n > 0: share = hits / n` the division thus runs before `n` is
tested. Its error is kept until then, and its result is NaN.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from tutti.torch_private.op_tables import OpOverload
from tutti.user_lines import generated_line, note_line

_NEVER_FAIL = (operator.add, operator.sub, operator.mul, operator.neg, operator.getitem)


class _Kept(threading.local):
    """The errors of a run on this thread; None outside of a run that keeps them."""

    errors: list[Exception] | None = None


_KEPT = _Kept()


@contextlib.contextmanager
def errors_kept() -> Iterator[list[Exception]]:
    """Inside, late operations add their errors to this list."""
    before, _KEPT.errors = _KEPT.errors, []
    try:
        yield _KEPT.errors
    finally:
        _KEPT.errors = before


@functools.cache
def late(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of numbers; its result is NaN in place of an error, which `errors_kept` collects."""

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ArithmeticError, ValueError) as error:
            if _KEPT.errors is not None:
                caller = sys._getframe(1)
                note_line(error, generated_line(caller, caller.f_lineno))
                _KEPT.errors.append(error)
            return math.nan

    return computed


def make_late(graph: fx.Graph, numbers: tuple[type, ...]) -> None:
    """Let the operations of a graph keep their errors whose values are of these types."""
    for node in graph.nodes:
        if node.op != "call_function" or isinstance(node.target, OpOverload):
            continue
        if isinstance(node.meta.get("val"), numbers) and node.target not in _NEVER_FAIL:
            node.target = late(node.target)
