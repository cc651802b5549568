"""What PyTorch keeps on an optimizer: its hooks, and marks for schedulers, fused kernels and loss scaling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

# Attributes that PyTorch writes on an optimizer as it steps: that it has stepped, that it has warned, that a
# fused kernel has checked its tensors.
# Why: they are not the user's state, and a fused step that has checked would not check a trace's tensors.
# Public: none.
UNCHECKED = "_need_device_dtype_check_for_fused"
MARKS = frozenset({"_opt_called", "_warned_capturable_if_run_uncaptured", UNCHECKED})


def mark_stepped(optimizer: Any) -> None:
    """Tell schedulers of learning rates that the optimizer has stepped.

    Why: they warn of an optimizer whose own `step` never ran. Public: none.
    """
    optimizer._opt_called = True


@contextmanager
def stepped_mark_kept(optimizer: Any) -> Iterator[None]:
    """After the block schedulers find the mark of `mark_stepped` as it was before.

    Why: a step that only makes slots is none of the user's. Public: none.
    """
    called = getattr(optimizer, "_opt_called", None)
    try:
        yield
    finally:
        if called is not None:
            optimizer._opt_called = called


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Whether a scheduler has put this around an optimizer's `step`.

    Why: a copy must not step the optimizer that it is a copy of. Public: none.
    """
    return hasattr(step, "_wrapped_by_lr_sched")


def has_hooks(optimizer: Any) -> bool:
    """Whether hooks can hang on an optimizer: one around another may have no tables for them.

    Why: `register_step_pre_hook` fails there. Public: none.
    """
    return hasattr(optimizer, _HOOKS[0])


def hooks_of_optimizer(optimizer: Any) -> Iterator[dict[int, Any] | None]:
    """The tables of hooks before and after an optimizer's step, two; None of one that has no tables.

    Why: a hook added after a trace makes another trace due. Public: none.
    """
    return (getattr(optimizer, name, None) for name in _HOOKS)


def remove_hooks(optimizer: Any) -> None:
    """Take all hooks off an optimizer: its tables are new ones.

    Why: a copy must not run the hooks of the original. Public: none.
    """
    for name in _HOOKS:
        setattr(optimizer, name, OrderedDict())


@contextmanager
def hooks_off(optimizer: Any) -> Iterator[None]:
    """Inside, an optimizer steps without its hooks.

    Why: as `stepped_mark_kept`. Public: none.
    """
    kept = {name: getattr(optimizer, name) for name in _HOOKS if hasattr(optimizer, name)}
    try:
        for name in kept:
            setattr(optimizer, name, type(kept[name])())
        yield
    finally:
        for name, table in kept.items():
            setattr(optimizer, name, table)


# The method `(scaler, optimizer, state, *args, **options)` of `GradScaler` that steps an optimizer, or does
# not: its class and its name, to patch.
# Why: its own choice sums Python numbers read from tensors. Public: none.
CHOICE_OF_SCALER: tuple[Any, str] = (GradScaler, "_maybe_opt_step")

# The attribute of an optimizer whose fused kernel unscales gradients and decides itself, where a `GradScaler`
# would do both: its class and its name, to patch.
# Why: as `CHOICE_OF_SCALER`. Public: none.
SCALED_BY_KERNEL: tuple[Any, str] = (Optimizer, "_step_supports_amp_scaling")


def is_scaled_by_kernel(optimizer: Any) -> bool:
    """Whether an optimizer's own kernel does what a `GradScaler` would do.

    Why: as `SCALED_BY_KERNEL`. Public: none.
    """
    return getattr(optimizer, SCALED_BY_KERNEL[1], False)
