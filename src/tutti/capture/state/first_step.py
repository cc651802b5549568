"""The step by which an optimizer makes its slots, and the optimizers whose steps cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from tutti.errors import CaptureError, TuttiError
from tutti.torch_private.optimizer_marks import is_hooked
from tutti.torch_private.storages import memory_id

# By kind: the reason and the fix.
_REFUSED = (
    (
        LBFGS,
        "it calls its closure and searches its line as often as the values of the loss say",
        "torch.optim.AdamW(...) or SGD(..., nesterov=True); or LBFGS on one device, outside of tutti",
    ),
    (
        SparseAdam,
        "it updates those rows alone that the batch has looked up, and gradients are dense in the step",
        "torch.optim.Adam(...) with sparse=False (moments of all rows decay at every step); or SGD or "
        "Adagrad (the same numbers as with sparse gradients)",
    ),
)


# Optimizers that communicate by themselves, by a class or the package of one: the fix.
_ACROSS_RANKS = {
    "ZeroRedundancyOptimizer": "the optimizer inside it, such as torch.optim.AdamW, and zero=1 in the layout",
    "horovod": "the optimizer that hvd.DistributedOptimizer wraps, and data=N in the layout",
}


def refuse_kind(optimizer: Optimizer) -> None:
    """Raise `CaptureError` for an optimizer with steps of different forms, or that communicates by itself."""
    for kind in type(optimizer).__mro__:
        fix = _ACROSS_RANKS.get(kind.__name__) or _ACROSS_RANKS.get(
            kind.__module__.partition(".")[0]
        )
        if fix:
            raise CaptureError(
                f"{type(optimizer).__name__} ({kind.__module__}) cannot be captured",
                why="it communicates by itself; in a step of one device the layout adds what ranks exchange",
                fix=fix,
            )
    for kind, why, fix in _REFUSED:
        if isinstance(optimizer, kind):
            raise CaptureError(f"{kind.__name__} cannot be captured", why=why, fix=fix)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds as attributes and calls (`base_optimizer` of SAM).

    A wrapper without groups and state of its own (Accelerate's) is none: those are another's. A wrapper with
    state of its own is one (Lookahead, which keeps slow weights).
    """
    found = _held(optimizer)
    return [
        one for one in found if owns_groups(one) or (is_hooked(one) and "state" in vars(one))
    ] or found


def pure_wrappers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds, if they have no groups and no state of their own.

    Only those whose steps PyTorch's hooks see.
    """
    return [one for one in _held(optimizer) if is_pure_wrapper(one)]


def is_pure_wrapper(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of those."""
    own = owns_groups(optimizer) or "state" in vars(optimizer)
    return (
        is_hooked(optimizer) and not own and any(one is not optimizer for one in _held(optimizer))
    )


def owns_groups(optimizer: Optimizer) -> bool:
    """Whether an optimizer has groups of its own: those of a wrapper may be another's, by a property."""
    return "param_groups" in vars(optimizer)


def _held(optimizer: Optimizer) -> list[Optimizer]:
    found = [optimizer]
    for one in found:
        held = (x for x in vars(one).values() if isinstance(x, Optimizer))
        found += [x for x in held if not any(x is y for y in found)]
    return found


def take_first_step(optimizer: Any, fresh: list[Tensor]) -> None:
    """A step with gradients of zero; an optimizer that needs a closure gets one that sets them."""

    def closure() -> Tensor:
        for p in fresh:
            p.grad = torch.zeros_like(p)
        return torch.zeros(())

    if _error_of(optimizer.step) is None:
        return
    closure()
    second = _error_of(lambda: optimizer.step(closure))
    if second is not None:
        kind = type(optimizer).__name__
        raise CaptureError(
            f"{kind} cannot take a step with gradients of zero ({type(second).__name__}: {second})",
            why="its slots are made by such a step before anything is captured",
            fix=f"a {kind} whose step() works with zero gradients, or one step of it before the model is "
            "distributed",
        ) from second


def _error_of(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except TuttiError:
        raise
    except Exception as error:
        return error
    return None


def part_from_weights(optimizer: Optimizer, fresh: list[Tensor]) -> None:
    """Give slots that share a weight's memory (`p.data = state["old_p"]`) memory of their own."""
    for p in fresh:
        slots = optimizer.state.get(p, {})
        for key, x in slots.items():
            if isinstance(x, Tensor) and _memory(x) == _memory(p):
                slots[key] = x.detach().clone()


def _memory(x: Tensor) -> int:
    return memory_id(x) if x.layout == torch.strided else id(x)
