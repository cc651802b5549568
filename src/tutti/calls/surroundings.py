"""What surrounds a call and changes a trace: autocast, the mode of gradients, the default dtype.

A trace runs inside of it, as the step would; a program has its casts already, and plays without autocast.
A step with an optimizer has gradients wherever it is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


def surroundings(*, trains: bool) -> tuple[Any, ...]:
    """A hashable key; `trains`: of a step with an optimizer."""
    return (
        torch.get_default_dtype(),
        trains or torch.is_grad_enabled(),
        *((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)),
    )


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, no device casts."""
    on = [d for d in _DEVICES if torch.is_autocast_enabled(d)]
    for d in on:
        torch.set_autocast_enabled(d, False)
    try:
        yield
    finally:
        for d in on:
            torch.set_autocast_enabled(d, True)


def is_cast() -> bool:
    """Whether a device casts."""
    return any(map(torch.is_autocast_enabled, _DEVICES))
