"""Equal programs captured once in a process, however many steps are made of them.

    with captured_once(name):          # around calls of a step whose model is as `zoo.CASES[name]` builds it
        step(*batch)

A capture is given neither rank nor layout, except for its precision. So it is that of each program of this
name whose state, hyper-parameters and batch have the same names and forms. Each use gets the state of its
own model.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from tutti.calls.guards import guard_of
from tutti.capture.captured import Captured
from tutti.capture.python.findings import Findings
from tutti.capture.state.lift import hypers_of, state_of
from tutti.capture.step import capture
from tutti.modes import plain

MOST = 8  # a graph has thousands of nodes
_KNOWN: OrderedDict[Hashable, Captured] = OrderedDict()


@contextmanager
def captured_once(name: Hashable) -> Iterator[None]:
    """Calls within are of the program `name`, under any layout."""

    def known(step: Any, model: nn.Module, optimizer: Any, batch: Any, **given: Any) -> Captured:
        return _captured(name, step, model, optimizer, batch, **given)

    with mock.patch.object(plain, "capture", known):
        yield


def _captured(
    name: Hashable,
    step: Callable[..., Any],
    model: nn.Module,
    optimizer: Any,
    batch: Sequence[Any],
    *,
    precision: str,
    findings: Findings,
    **given: Any,
) -> Captured:
    def made() -> Captured:
        arguments: dict[str, Any] = given | {"precision": precision, "findings": findings}
        return capture(step, model, optimizer, batch, **arguments)

    if any(given.values()):  # it depends on earlier calls
        return made()
    state, hypers = state_of(model, optimizer), hypers_of(optimizer)
    key = (
        name,
        precision,
        tuple((s.name, s.kind, s.owner, s.slot, *_form(s.tensor)) for s in state),
        tuple(h.name for h in hypers),
        tuple(m.training for m in model.modules()),
        tuple(_form(x) for x in batch),
    )
    captured = _KNOWN.pop(key, None)
    if captured is None or not guard_of(captured)({h.name: h.value for h in hypers}):
        captured = made()
        if not _is_of_forms(captured, findings):
            return captured
    _KNOWN[key] = captured
    while len(_KNOWN) > MOST:
        _KNOWN.popitem(last=False)
    return dataclasses.replace(captured, state=state)


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.requires_grad


def _is_of_forms(captured: Captured, findings: Findings) -> bool:
    """Whether nothing in it is a place in Python, or a value that the step reads."""
    places = (captured.numbers, captured.effects, captured.outside, captured.reads)
    return not any((*places, findings.varying, findings.fixed))
