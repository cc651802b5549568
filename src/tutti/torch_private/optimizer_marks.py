"""PyTorch's attributes of an optimizer: hooks, and marks for schedulers, fused kernels and loss scaling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL: tuple[Any, ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)

# Attributes that PyTorch sets in an optimizer's step: that it has stepped, that it has warned, that a fused
# kernel has checked its tensors.
# Why: they are not the user's state, and a fused step that has checked would skip a trace's tensors.
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
    """Restore the mark of `mark_stepped` after the block.

    Why: a step that only makes slots is not the user's. Public: none.
    """
    called = getattr(optimizer, "_opt_called", None)
    try:
        yield
    finally:
        if called is not None:
            optimizer._opt_called = called


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Whether this is a scheduler's wrapper of an optimizer's `step`.

    Why: a copy must not step the original. Public: none.
    """
    return hasattr(step, "_wrapped_by_lr_sched")


@contextmanager
def hook_before_steps(optimizer: Any, hook: Callable[..., None]) -> Iterator[None]:
    """Inside, `hook(optimizer, args, kwargs)` runs before the optimizer's steps, if it has a table of hooks.

    Why: `register_step_pre_hook` fails for a wrapper of another optimizer that has no table, or a plain dict
    in its place. Public: none.
    """
    table = getattr(optimizer, _HOOKS[0], None)
    if table is None:
        yield
        return
    key = object()
    table[key] = hook
    try:
        yield
    finally:
        table.pop(key, None)


def hooks_of_optimizer(optimizer: Any) -> Iterator[dict[int, Any] | None]:
    """The tables of hooks before and after an optimizer's step, its own two and those of all optimizers; None
    for one without tables.

    Why: a hook added after a trace requires another trace. Public: none.
    """
    own = [getattr(optimizer, name, None) for name in _HOOKS]
    return iter([*own, *_OF_ALL] if None not in own else own)


def is_hooked(optimizer: Any) -> bool:
    """Whether an optimizer has tables for hooks on its steps.

    Why: a wrapper without them does not count as an optimizer of its own. Public: none.
    """
    return all(name in vars(optimizer) for name in _HOOKS)


def remove_hooks(optimizer: Any) -> None:
    """Remove all hooks of an optimizer: it gets new tables.

    Why: a copy must not run the hooks of the original. Public: none.
    """
    for name in _HOOKS:
        setattr(optimizer, name, OrderedDict())


@contextmanager
def hooks_off(optimizer: Any) -> Iterator[None]:
    """Inside, an optimizer steps without its hooks and those of all optimizers.

    Why: as `stepped_mark_kept`. Public: none.
    """
    kept = {name: getattr(optimizer, name) for name in _HOOKS if hasattr(optimizer, name)}
    of_all = [dict(table) for table in _OF_ALL]
    for table in _OF_ALL:
        table.clear()
    try:
        for name in kept:
            setattr(optimizer, name, type(kept[name])())
        yield
    finally:
        for name, table in kept.items():
            setattr(optimizer, name, table)
        for table, hooks in zip(_OF_ALL, of_all, strict=True):
            table.update(hooks)


# The method `(scaler, optimizer, state, *args, **options)` of `GradScaler` that steps an optimizer or skips
# it: its class and its name, to patch.
# Why: its own choice sums Python numbers read from tensors. Public: none.
CHOICE_OF_SCALER: tuple[Any, str] = (GradScaler, "_maybe_opt_step")

# The attribute of an optimizer whose fused kernel unscales gradients and decides itself, in place of a
# `GradScaler`: its class and its name, to patch.
# Why: as `CHOICE_OF_SCALER`. Public: none.
SCALED_BY_KERNEL: tuple[Any, str] = (Optimizer, "_step_supports_amp_scaling")


def is_scaled_by_kernel(optimizer: Any) -> bool:
    """Whether an optimizer's own kernel does the work of a `GradScaler`.

    Why: as `SCALED_BY_KERNEL`. Public: none.
    """
    return getattr(optimizer, SCALED_BY_KERNEL[1], False)
