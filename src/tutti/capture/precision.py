"""`precision=bf16`: the forward under PyTorch's autocast, gradients and the update in float32.

                 forward + loss    backward          clipping, optimizer
    autocast     on                off: each op in   off
                                   its forward's dtype

Weights stay float32; autocast casts them where its lists say so. The gradient of a cast is a cast back, so
gradients are float32, and so are their sums. The user's own `torch.autocast` applies inside its `with`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tutti.capture.backwards import Engine, around_backward
from tutti.errors import LayoutError
from tutti.graph.edits.patch import hook_here

# The compute dtype of a layout's `precision`; None keeps the model's dtypes.
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@contextlib.contextmanager
def computing(precision: str, model: nn.Module) -> Iterator[None]:
    """Inside, a training step, eager or traced, computes in the layout's `precision`."""
    dtype = DTYPES[precision]
    if dtype is None:
        yield
        return
    forward = _Forward(_device_type(model))
    hooks = [
        register_module_forward_pre_hook(hook_here(forward.on_module)),
        register_optimizer_step_pre_hook(hook_here(forward.on_optimizer)),
    ]
    try:
        with _autocast(forward.device_type, dtype), around_backward(forward.around):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Forward:
    """Switches autocast off for the backward and the update, and on again for the next forward."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.paused = False
        self.num_backwards = 0  # running now: recomputation calls modules and other backwards

    def around(self, run: Engine) -> Engine:
        """`run`, PyTorch's autograd engine, without autocast: its ops take the dtypes of the forward."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            before = torch.is_autocast_enabled(self.device_type)
            torch.set_autocast_enabled(self.device_type, False)
            self.num_backwards += 1
            try:
                return run(*args, **kwargs)
            finally:
                self.num_backwards -= 1
                torch.set_autocast_enabled(self.device_type, before)
                if kwargs.get("accumulate_grad") and not self.num_backwards:
                    self._pause()

        return backward

    def on_optimizer(self, *_: Any) -> None:
        """Called when an optimizer begins its step."""
        self._pause()

    def on_module(self, *_: Any) -> None:
        """Called with each module: the forward continues, or another one begins."""
        if self.paused and not self.num_backwards and not _inside_autocast():
            self.paused = False
            torch.set_autocast_enabled(self.device_type, True)

    def _pause(self) -> None:
        if not _inside_autocast():
            self.paused = True
            torch.set_autocast_enabled(self.device_type, False)


@contextlib.contextmanager
def _autocast(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast outside of the nesting count, so that the user's own stays the outermost one.

    Its cache is off: it would keep a cast made under `no_grad` for later training, and sum the gradients of
    a weight with two uses in bfloat16. The graph merges equal casts instead.
    """
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.set_autocast_cache_enabled(cached)


def _inside_autocast() -> bool:
    """Whether the user's own `torch.autocast` is open."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def _device_type(model: nn.Module) -> str:
    for p in model.parameters():
        return p.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def refuse_other_weights(
    precision: str, weights: dict[str, torch.dtype], updated: frozenset[str]
) -> None:
    """Raise `LayoutError` unless the weights that a step updates can be master weights in float32.

    Frozen weights (a base under adapters, an evaluation) may have any dtype; some of several weights may be
    float64, which autocast does not cast.
    """
    if DTYPES[precision] is None:
        return
    for name, dtype in weights.items():
        if name in updated and dtype in (torch.bfloat16, torch.float16):
            raise LayoutError(
                f'precision={precision} updates weights in float32, but "{name}" is {_short(dtype)}',
                why="a weight in a half type loses updates that are small beside it",
                fix="model.float() before the optimizer is made, or leave precision out to compute in "
                "the model's own dtypes",
            )
    if weights and all(dtype == torch.float64 for dtype in weights.values()):
        raise LayoutError(
            f"precision={precision} would change nothing: every weight is float64",
            why="PyTorch's autocast leaves float64 as it is",
            fix="model.float() before the optimizer is made, or leave precision out",
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
