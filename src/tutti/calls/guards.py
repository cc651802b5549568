"""The guards of a trace: its branches on numbers, and the tensor values that it reads.

Numbers are known before a run. The values that a step reads from tensors are known after one: if they lead to
other branches, the program is not the one for this call, and its results do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.capture.captured import Captured
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.read_places import Place
from tutti.capture.python.symbols import SYMBOLS
from tutti.errors import CaptureError
from tutti.layout import Layout
from tutti.torch_private.autograd_engine import are_unwritten, version_of
from tutti.torch_private.symbolic import PythonPrinter, expression_of
from tutti.user_lines import quoted

# Whether a trace is valid for numbers by name.
Guard = Callable[[Mapping[str, float]], bool]
MOST_WAYS = 16  # traces for one call
_LIBRARY = {"math": math, "torch": torch}


def guard_of(captured: Captured) -> Guard:
    """One condition for everything known before a run: numbers, and constant tensors."""
    of_numbers, constants = _of_numbers(captured), _constants(captured)
    if not constants:
        return of_numbers
    return lambda given: of_numbers(given) and are_unwritten(constants)


def _constants(captured: Captured) -> list[tuple[Tensor, int]]:
    """The tensors that a graph holds, with the version counter of each."""
    nodes = (n for n in captured.graph.nodes if n.op == "get_attr")
    held = [getattr(captured.owner, str(n.target)) for n in nodes]
    plain = [x for x in held if isinstance(x, Tensor) and not x.is_inference()]
    return [(x, version_of(x)) for x in {id(x): x for x in plain}.values()]


def _of_numbers(captured: Captured) -> Guard:
    symbols, reads = symbols_of(captured), frozenset(captured.reads.symbols)
    conditions: dict[str, None] = {}
    used: dict[Any, str] = {}
    for expr in captured.guards:
        known = expr.free_symbols & symbols.keys()
        if expr.free_symbols & reads:
            continue
        if known and known != expr.free_symbols:
            return lambda given: False  # the trace is valid for this call only
        if known:
            conditions[f"({PythonPrinter().doprint(expr)})"] = None
            used |= {s: symbols[s] for s in expr.free_symbols}
    if not conditions:
        return lambda given: True
    names = list(used.values())
    holds = _function(used, " and ".join(conditions))
    return lambda given: all(n in given for n in names) and holds(*(given[n] for n in names))


class ReadGuard:
    """Checks the branches of a run against its trace, by the tensor values that the step reads."""

    def __init__(self, captured: Captured) -> None:
        self._first, self._reads = captured.num_results, captured.reads.places
        symbols = symbols_of(captured)
        reads = {s: str(s) for s in captured.reads.symbols}
        conditions: dict[str, list[Any]] = {}  # each with its symbols
        used: dict[Any, str] = {}
        for text, expr in _conditions(captured):
            if expr.free_symbols & reads.keys():
                conditions[text] = [s for s in expr.free_symbols if s in symbols or s in reads]
                used |= {s: symbols[s] for s in expr.free_symbols & symbols.keys()}
        self._numbers = list(used.values())
        given = [*used, *reads]
        self._holds = _function(given, " and ".join(conditions) or "True")
        places = {s: k for k, s in enumerate(given)}
        self._each = [
            _Condition(_function(own, text), [places[s] for s in own])
            for text, own in conditions.items()
        ]

    def values(self, results: Sequence[Any]) -> dict[Place, float]:
        """The values read in a run, by the place of the read."""
        read = results[self._first : self._first + len(self._reads)]
        return {k: x.item() for k, x in zip(self._reads, read, strict=True)}

    def holds(self, given: Mapping[str, Any], values: Mapping[Place, float]) -> bool:
        """Whether these values lead to the branches of this trace."""
        known = all(k in values for k in self._reads)
        return known and _is_true(self._holds, self._arguments(given, values))

    def may_hold(self, given: Mapping[str, Any], values: Mapping[Place, float]) -> bool:
        """Whether no known value excludes this trace, and some are unknown: those of a loop's later turns."""
        known = [k in values for k in self._reads]
        arguments = self._arguments(given, {k: values.get(k, math.nan) for k in self._reads})
        known = [True] * len(self._numbers) + known
        return not all(known) and all(
            one.holds(arguments) for one in self._each if all(known[k] for k in one.places)
        )

    @property
    def num_reads(self) -> int:
        """The number of reads on which branches depend."""
        return len(self._reads)

    def assumed(self, given: Mapping[str, Any], values: Mapping[Place, float]) -> Assumed:
        """What another trace assumes by the values of a run that went other ways than this trace."""
        arguments = self._arguments(given, values)
        failed = (max(one.places) for one in self._each if not one.holds(arguments))
        first = min(failed, default=-1) - len(self._numbers)
        return Assumed(values, frozenset(self._reads[: max(first + 1, 0)]))

    def _arguments(self, given: Mapping[str, Any], values: Mapping[Place, float]) -> list[Any]:
        return [given[n] for n in self._numbers] + [values[k] for k in self._reads]


@dataclass(frozen=True)
class _Condition:
    """A condition of a branch, and the places of its arguments among all: numbers first, then reads."""

    function: Callable[..., Any]
    places: list[int]

    def holds(self, arguments: Sequence[Any]) -> bool:
        return _is_true(self.function, [arguments[k] for k in self.places])


def _is_true(condition: Callable[..., Any], given: list[Any]) -> bool:
    try:
        return bool(condition(*given))
    except (ArithmeticError, ValueError):  # a logarithm of zero; eager takes another branch
        return False


def no_way(captured: Captured, values: Mapping[Place, float]) -> CaptureError:
    """The error for a step without a trace for the branches of its values."""
    return CaptureError(
        f"the step takes another way at each of {MOST_WAYS} traces, by values that it reads from tensors",
        at=quoted(captured.reads.source),
        why=f"the last values were {[round(x, 6) for x in list(values.values())[:8]]}",
        fix="torch.where(condition, a, b) on tensors instead of if/else",
    )


def refuse_other_layouts(captured: Captured, layout: Layout) -> None:
    """Raise `CaptureError` if the ranks could go different ways by the values that the step reads: those of a
    replica are its own."""
    if layout.num_replicas > 1:
        captured.reads.refuse(
            "and replicas would go different ways",
            "a layout without replica (data=N), where all ranks take the same step",
        )


def symbols_of(captured: Captured) -> dict[Any, str]:
    """The names of the input numbers, by their symbols."""
    vals = {name: node.meta.get("val") for name, node in captured.placeholders.items()}
    return {expression_of(x): name for name, x in vals.items() if isinstance(x, SYMBOLS)}


def _conditions(captured: Captured) -> list[tuple[str, Any]]:
    printed = PythonPrinter().doprint
    found = [(f"({printed(expr)})", expr) for expr in captured.guards]
    for name, expr, answer in captured.reads.asked:
        found.append((f"(math.{name}({printed(expr)}) is {answer})", expr))
    return found


def _function(symbols: Any, text: str) -> Callable[..., Any]:
    return eval(  # noqa: S307  # our own text, of sympy's expressions in this process
        f"lambda {', '.join(map(str, symbols))}: {text}", _LIBRARY
    )  # of PyTorch's own printing
