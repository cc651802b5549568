"""The default device that a user has set (`torch.set_default_device`, `with torch.device(...)`).

It counts in the user's step; tutti's own tensors without a device, such as counts and texts for other ranks,
lie on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from tutti.torch_private.dispatch_modes import num_function_modes

_Class = TypeVar("_Class")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_USERS: ContextVar[torch.device | None] = ContextVar("default device", default=None)


def in_own_default(function: _Function) -> _Function:
    """The function with the CPU as the default device, but for the user's code that it calls."""

    @functools.wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        if not num_function_modes() or (device := torch.get_default_device()).type == "cpu":
            return function(*args, **named)
        token = _USERS.set(device)
        try:
            with torch.device("cpu"):
                return function(*args, **named)
        finally:
            _USERS.reset(token)

    return called  # type: ignore[return-value]


def own_default_in(*names: str) -> Callable[[type[_Class]], type[_Class]]:
    """A decorator of a class: `in_own_default` for these methods."""

    def changed(kind: type[_Class]) -> type[_Class]:
        for name in names:
            setattr(kind, name, in_own_default(getattr(kind, name)))
        return kind

    return changed


@contextlib.contextmanager
def users_default() -> Iterator[None]:
    """Inside of such a function, the default device that the user has set."""
    device = _USERS.get()
    with contextlib.nullcontext() if device is None else torch.device(device):
        yield
