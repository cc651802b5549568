"""Refuses slots whose first values depend on an option that the step itself sets.

Capture makes slots before the step, from the options at that time: ASGD's `eta` and Rprop's `step_size` start
as the learning rate. A step that sets that rate before its optimizer's step would start from another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.capture.state.first_form import first_slots
from tutti.capture.state.first_step import inner_optimizers
from tutti.capture.state.lift import SCHEDULED, optimizers_of
from tutti.errors import CaptureError
from tutti.torch_private.optimizer_marks import hook_before_steps


@contextlib.contextmanager
def options_watched(optimizer: Any) -> Iterator[dict[Optimizer, str]]:
    """Yield the optimizers called inside after a change of a scheduled option, with that option."""
    found: dict[Optimizer, str] = {}
    found_in = (inner for one in optimizers_of(optimizer) for inner in inner_optimizers(one))
    before = {one: [dict(group) for group in one.param_groups] for one in found_in}

    def look(one: Any, *_given: Any) -> None:
        for group, kept in zip(one.param_groups, before[one], strict=False):
            for key, value in kept.items():
                if key in SCHEDULED and group.get(key) is not value:
                    found.setdefault(one, key)

    with contextlib.ExitStack() as stack:
        for one in before:
            stack.enter_context(hook_before_steps(one, look))
        yield found


def refuse_first_options(found: dict[Optimizer, str]) -> None:
    """Raise for one of these optimizers before its first step if its slots depend on its options."""
    for one, option in found.items():
        plain, other = first_slots(one), first_slots(one, 1.5)
        for slots, others in zip(plain, other, strict=True):
            for key, value in slots.items():
                if not _is(value, others.get(key)) and _is_there(one, key, value):
                    kind = type(one).__name__
                    raise CaptureError(
                        f'the step sets "{option}" before the first step of {kind}',
                        why=f'{kind} begins its "{key}" by it, and slots are made before a step is captured',
                        fix=f"set it before the first call too; or {kind}.step() once before distribute",
                    )


def _is_there(one: Optimizer, key: Any, first: Any) -> bool:
    """Whether a parameter's slot still has its first value."""
    return any(key in slots and _is(slots[key], first) for slots in one.state.values())


def _is(a: Any, b: Any) -> bool:
    """Whether two slots may start with the same value; one without values may."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _begins_as(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is, a, b))
    return a == b


def _begins_as(a: Tensor, b: Tensor) -> bool:
    if type(a) is not Tensor or a.is_meta or not a.numel() or not b.numel():
        return a.is_meta
    x, y = (complex(v.detach().flatten()[0].item()) for v in (a, b))
    return x == y or abs(x - y) <= 1e-6 * abs(y)  # one may have another precision
