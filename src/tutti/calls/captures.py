"""The captures of one step: one for each set of batch sizes, most of them from one symbolic trace.

The first sizes get a concrete trace. For further sizes one more trace has symbols in place of the sizes that
differ. Substitution of sizes gives the graph for any sizes that satisfy the guards of that trace. A symbolic
trace counts only if it reproduces the captured graph of the first sizes. Without one, each set of sizes gets
a concrete trace.

A trace begins with the tensor values that the last call has read, as hints: its own call mostly takes the
same branches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.calls.guards import guard_of
from tutti.calls.python_values import PythonValues
from tutti.capture.alike import difference
from tutti.capture.captured import Captured
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.findings import Findings
from tutti.capture.python.read_places import Place
from tutti.capture.python.sizes import FreeSizes, Shapes
from tutti.capture.resized import Resizable
from tutti.capture.state.left_modes import modes_kept
from tutti.capture.state.lift import StateTensor, state_of
from tutti.capture.substitutes.sparse import dense
from tutti.state.residence import forget_values
from tutti.torch_private.pytrees import tree_leaves

# The most traces for batches that differ only in sizes, the most failed ones, and the most kinds of batches
# with traces: the least recently used one goes first.
FIRST_SIZES = 2  # sizes with concrete traces: a symbolic trace takes twice as long
MOST_TRACES = 4
MOST_FAILURES = 2
MOST_KINDS = 8

# capture(free sizes, findings, assumed tensor values)
Capture = Callable[[FreeSizes | None, Findings, Assumed], Captured]


@dataclass
class _Trace:
    sizes: Resizable
    renewed: frozenset[Any]
    modes: list[tuple[nn.Module, bool]]  # set by the step itself


@dataclass
class _Kind:
    """The traces for batches that differ only in sizes."""

    first: Captured  # the concrete trace, and its shapes
    shapes: Shapes
    met: list[Shapes]
    traces: list[_Trace] = field(default_factory=list)
    num_failures: int = 0


class Captures:
    """The captures of one step on `model`."""

    def __init__(self, model: nn.Module, optimizer: Any, python: PythonValues) -> None:
        self._model, self._optimizer, self._python = model, optimizer, python
        self._kinds: dict[Any, _Kind] = {}
        self._last: tuple[Captured, Shapes] | None = None
        self._hints = Assumed()
        self.is_resized = False  # whether the last capture comes from a symbolic trace

    def of(
        self,
        key: Any,
        given: Mapping[str, float],
        batch: Sequence[Any],
        renewed: Mapping[int, Tensor],
        capture: Capture,
    ) -> Captured:
        """The captured step for a batch.

        Args:
            key: all dependencies of a trace besides the sizes of the batch and its inputs.
            given: the numbers of this call.
            renewed: as for `capture`.
        """
        shapes = [tuple(x.shape) for x in tree_leaves(dense(tuple(batch))) if isinstance(x, Tensor)]
        self.is_resized = False
        kind = self._kinds.pop(key, None)
        if kind is not None:
            self._kinds[key] = kind
            now = frozenset((i, id(new)) for i, new in renewed.items())
            made = self._known(kind, shapes, given, now) or self._traced(
                kind, shapes, given, now, capture
            )
            if made is not None:
                self._last, self.is_resized = None, True
                return made
        made = capture(None, self._python.findings, self._hints)
        self._last = made, shapes
        return made

    def hint(self, values: Mapping[Place, float]) -> None:
        """Note the tensor values that a call has read."""
        self._hints = Assumed(values)

    def enter(self, key: Any) -> None:
        """Let the last capture serve calls with this key."""
        if self._last is not None:
            captured, shapes = self._last
            kind = self._kinds.setdefault(key, _Kind(captured, shapes, []))
            if kind.first is not captured or not kind.met:
                kind.first, kind.shapes = captured, shapes
                kind.met = [*kind.met, shapes][-MOST_TRACES:]
        while len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def _known(
        self, kind: _Kind, shapes: Shapes, given: Mapping[str, float], renewed: frozenset[Any]
    ) -> Captured | None:
        for trace in kind.traces:
            state = self._state(trace.sizes.captured) if renewed <= trace.renewed else None
            made = trace.sizes.of(shapes, state) if state is not None else None
            if made is not None and self._holds(made, given):
                for module, training in trace.modes:
                    module.training = training
                return made
        return None

    def _holds(self, made: Captured, given: Mapping[str, float]) -> bool:
        """Whether a capture is valid for the numbers `given` and those that it draws."""
        draws = self._python.draws
        numbers = draws.added(given, made.drawn)
        draws.put_back()
        return numbers is not None and guard_of(made)(numbers)

    def _traced(
        self,
        kind: _Kind,
        shapes: Shapes,
        given: Mapping[str, float],
        renewed: frozenset[Any],
        capture: Capture,
    ) -> Captured | None:
        """A capture from a new symbolic trace; None if that does not cover these sizes."""
        free = FreeSizes.between(*kind.met, shapes)
        hopeless = kind.num_failures >= MOST_FAILURES or len(kind.traces) >= MOST_TRACES
        if (
            len(kind.met) < FIRST_SIZES
            or hopeless
            or not free.groups
            or free.sizes_in(shapes) is None
        ):
            return None
        with modes_kept(self._model) as modes:
            found = self._resizable(free, shapes, capture)
            after = [(m, m.training) for m, before in modes if m.training != before]
        if found is None or not self._is_right(found, kind):
            kind.num_failures += 1
            return None
        forget_values(found.captured.state)
        kind.met.append(shapes)
        kind.traces.insert(0, _Trace(found, renewed, after))
        return self._known(kind, shapes, given, renewed)

    def _is_right(self, found: Resizable, kind: _Kind) -> bool:
        """Whether a trace reproduces the captures of the sizes with concrete traces."""
        again = found.of(kind.shapes, kind.first.state)
        return again is not None and not difference(again, kind.first)

    def _resizable(self, free: FreeSizes, shapes: Shapes, capture: Capture) -> Resizable | None:
        """A symbolic trace. Its exceptions are no errors of the step, which then gets a concrete trace."""
        known = self._python.findings
        findings = copy.deepcopy(known)
        try:
            captured = capture(free, findings, self._hints)
            return Resizable(captured, free, shapes) if findings == known else None
        except Exception:
            return None

    def _state(self, captured: Captured) -> list[StateTensor] | None:
        """The current state; None if it differs from the state of a trace."""
        state = state_of(self._model, self._optimizer)
        for name, entry in captured.outside.items():
            value = self._python.state.entry_like(entry).get()
            if not isinstance(value, Tensor):
                return None
            state.append(StateTensor(name, "buffer", value))
        if state != captured.state:
            return None
        both = zip(state, captured.state, strict=True)
        return state if all(_form(a.tensor) == _form(b.tensor) for a, b in both) else None


def _form(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype
