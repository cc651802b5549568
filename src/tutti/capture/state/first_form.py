"""Optimizers whose first step has another form than a step on slots made beforehand.

SOAP's first step makes a basis of the gradients and keeps the weights, SGD with dampening does not damp its
first momentum, others fail at gradients of zero. A graph that is the same at every call cannot hold such a
step. A numerical test finds these optimizers:

    (a) a copy takes its first steps
    (b) a copy whose slots `create_slots` has made takes the same steps

both on parameters of the same forms with random values and random gradients. If the values of (b) differ from
those of (a), the first step runs eagerly, and capture starts from its slots.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from tutti.capture.second_trace.random_ops import OurRandomness, rewinding
from tutti.capture.state.first_step import inner_optimizers, part_from_weights, refuse_kind
from tutti.capture.state.lift import (
    Undo,
    create_slots,
    is_scheduled,
    optimizers_of,
    place_counts,
    without_hooks,
)
from tutti.capture.state.slots_by_form import make_slots_by_form
from tutti.capture.state.stand_ins import SEED, StandIns, step_with, values_like
from tutti.capture.state.trial_steps import trial
from tutti.errors import CaptureError, TuttiError
from tutti.torch_private.pytrees import tree_leaves

TOLERANCE = 8  # in units of the last place of a tensor's largest element


class SlotsAhead(CaptureError):
    """A step that cannot be captured yet: an optimizer makes slots in it, which no graph could keep."""


@dataclass
class _Form:
    """Knowledge of an optimizer. `without` are the parameters that its steps leave without slots."""

    is_other: bool
    without: set[tuple[int, int, int]] = field(default_factory=set)


_FORMS: weakref.WeakKeyDictionary[Optimizer, _Form] = weakref.WeakKeyDictionary()


def awaiting(optimizer: Any) -> Optimizer | None:
    """An optimizer whose next step is a first step of another form; None without one."""
    return next((one for one in given_optimizers(optimizer) if _awaits(one)), None)


def make_slots(optimizer: Any) -> None:
    """`create_slots`, except for optimizers whose first step has another form, which makes their slots."""
    for one in given_optimizers(optimizer):
        if _fresh(one) and _form_of(one).is_other:
            continue
        if not (is_of_pytorch(one) and make_slots_by_form(one)):
            create_slots(one)
        for inner in inner_optimizers(one):
            place_counts(inner)


def make_places(optimizer: Any) -> None:
    """Make slots to load before the first step, for an optimizer whose first step has another form.

    A step with random gradients makes them; the weights keep their values.

    Raises:
        CaptureError: for an optimizer that cannot take such a step.
    """
    for one in (x for x in given_optimizers(optimizer) if _awaits(x)):
        undo, draw = Undo(), torch.Generator().manual_seed(SEED)
        params = list({id(p): p for x in inner_optimizers(one) for p in _params(x)}.values())
        grads = [values_like(list(p.shape), p, draw) for p in params]
        kept = [p.grad for p in params]
        try:
            ours = OurRandomness(SEED, 0)
            with (
                _host_randomness_kept(),
                ours,
                rewinding(ours),
                undo,
                trial(one),
                without_hooks(one),
            ):
                step_with(one, params, grads, by_closure=False)
        except Exception as error:
            kind = type(one).__name__
            raise CaptureError(
                f"{kind} has no slots yet, and takes no step of its own ({type(error).__name__}: {error})",
                why="its first step has another form than the later ones, and makes the slots",
                fix="call the step once with any batch, then load: all values are those loaded",
            ) from error
        finally:
            undo.undo()
            for p, grad in zip(params, kept, strict=True):
                p.grad = grad


def note_step(optimizer: Any) -> None:
    """After an eager step: note parameters without slots, which need none, and part slots from weights."""
    for one in given_optimizers(optimizer):
        for inner in inner_optimizers(one):
            part_from_weights(inner, _params(inner))
        if one in _FORMS:
            _FORMS[one].without = _fresh(one)


def first_step_ahead(optimizer: Any, name: str = "") -> SlotsAhead:
    """The error for a capture of `optimizer`'s first step."""
    kind = type(optimizer).__name__
    return SlotsAhead(
        f"{kind} takes a first step of another form" + (f' for "{name}"' if name else ""),
        why="a step is captured with slots made beforehand, and is the same at every call",
        fix="tutti.distribute(...)(*batch) takes it eagerly; or take one step of it before",
    )


def given_optimizers(optimizer: Any) -> list[Optimizer]:
    """The optimizers of a step as the user gave them: one, or a container of several."""
    optimizers_of(optimizer)  # raises for a value that is none
    found = [] if optimizer is None else tree_leaves(optimizer)
    return list({id(one): one for one in found}.values())


def _params(one: Optimizer) -> list[Tensor]:
    return [p for group in one.param_groups for p in group["params"]]


def _fresh(one: Optimizer) -> set[tuple[int, int, int]]:
    """The parameters without slots, by optimizer inside, group, and position in the group."""
    return {
        (k, g, j)
        for k, inner in enumerate(inner_optimizers(one))
        for g, group in enumerate(inner.param_groups)
        for j, p in enumerate(group["params"])
        if p.requires_grad and not inner.state.get(p)
    }


def _awaits(one: Optimizer) -> bool:
    fresh = _fresh(one)
    return bool(fresh) and _form_of(one).is_other and not fresh <= _FORMS[one].without


def is_known_other(one: Optimizer) -> bool:
    """Whether the comparison has found that an optimizer's first step has another form."""
    return one in _FORMS and _FORMS[one].is_other


def _form_of(one: Optimizer) -> _Form:
    if one not in _FORMS:
        for inner in inner_optimizers(one):
            refuse_kind(inner)
        _FORMS[one] = _Form(_is_dampened(one) if is_of_pytorch(one) else _is_other(one))
    return _FORMS[one]


def is_of_pytorch(one: Optimizer) -> bool:
    """Whether an optimizer is PyTorch's own, which accepts slots made beforehand."""
    return type(one).__module__.startswith("torch.optim.")


def _is_dampened(one: Optimizer) -> bool:
    groups = one.param_groups if isinstance(one, SGD) else ()
    return any(group.get("momentum") and group.get("dampening") for group in groups)


def first_slots(one: Optimizer, factor: float = 1.0) -> list[dict[Any, Any]]:
    """The slots of an optimizer before its first step, for a parameter of each form, from a copy; scheduled
    numeric options are scaled by `factor`."""
    made = StandIns(one)
    for group in made.optimizer.param_groups:
        scheduled = {k: v for k, v in group.items() if is_scheduled(k, v)}
        group |= {k: v * factor for k, v in scheduled.items() if isinstance(v, float)}
    made.make_slots()
    return [dict(made.optimizer.state.get(p, {})) for p in made.params]


# --- the comparison -------------------------------------------------------------------------------


def _is_other(one: Optimizer) -> bool:
    """Whether copies of an optimizer take a first step of another form, or cannot rule it out."""
    with _host_randomness_kept(), torch.random.fork_rng(devices=()):
        for by_closure in (False, True):
            try:
                expected = StandIns(one).after_steps(by_closure)
            except TuttiError:
                raise
            except Exception:  # noqa: S112  # the loop tries the next way
                continue
            try:
                made = StandIns(one)
                made.make_slots()
                begins_with = made.shared
                found = made.after_steps(by_closure)
                return made.shared != begins_with or not _are_same(found, expected)
            except Exception:
                return True
    return True


def _are_same(a: Any, b: Any) -> bool:
    """Whether two values are equal up to rounding: tensors, numbers, and containers of them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and _are_close(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_same, a, b))
    if isinstance(a, int | float):
        return a == b or a != a or abs(a - b) <= 1e-12 * abs(b)
    return a == b if isinstance(a, str) else True


def _are_close(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = a.detach().nan_to_num(0, 0, 0), b.detach().nan_to_num(0, 0, 0)
    largest = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= TOLERANCE * torch.finfo(a.dtype).eps * largest).all())


@contextlib.contextmanager
def _host_randomness_kept() -> Iterator[None]:
    """Restore the state of Python's and NumPy's generators."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
