"""Temporary replacements of attributes of other libraries, each a value with its reason.

A function is replaced for one thread, unless the replacement only takes less time or makes notes. A script's
other threads, such as one that prepares batches or acts in an environment, call the original meanwhile.
Threads of PyTorch's autograd engine work for the first one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import FrameType, ModuleType
from typing import Any

_MISSING: Any = object()


@dataclass(frozen=True, eq=False)
class Patch:
    """An attribute to replace for a while.

    owner: the module, class or object that has it.
    reason: why, in one line.
    create: the attribute need not exist before.
    all_threads: other threads get the replacement, too.
    """

    owner: Any
    name: str
    reason: str
    create: bool = False
    all_threads: bool = False

    @property
    def place(self) -> str:
        """The dotted name of the owner."""
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}.{self.owner.__qualname__}"
        named = isinstance(self.owner, ModuleType)
        return self.owner.__name__ if named else f"{type(self.owner).__name__} {self.owner.name}"

    def of(self, owner: Any) -> Patch:
        """This patch for one object in place of its class."""
        return replace(self, owner=owner)

    @property
    def original(self) -> Any:
        """The current value; raises `AttributeError` without one."""
        found = self._own()
        if found is not _MISSING:
            return found
        return (
            getattr(self.owner, self.name, None) if self.create else getattr(self.owner, self.name)
        )

    def _own(self) -> Any:
        """The owner's own attribute, not an inherited one, as stored (`staticmethod`, say)."""
        return getattr(self.owner, "__dict__", {}).get(self.name, _MISSING)

    def _put_back(self, own: Any) -> None:
        if own is not _MISSING:
            setattr(self.owner, self.name, own)
        elif self._own() is not _MISSING:
            delattr(self.owner, self.name)


def each(owner: Any, names: Iterable[str], reason: str, **options: Any) -> dict[str, Patch]:
    """Patches of several attributes of one owner, for one reason, by name."""
    return {name: Patch(owner, name, reason, **options) for name in names}


@contextlib.contextmanager
def replaced(*pairs: tuple[Patch, Any]) -> Iterator[None]:
    """Inside, each attribute has the value paired with its patch; the end restores all, after errors too.

    Raises `AttributeError` for a missing attribute, before it replaces any.
    """
    instead = [(patch, _guarded(patch, value)) for patch, value in pairs]
    with contextlib.ExitStack() as stack:
        for patch, value in instead:
            # Noted first: an interrupt may come in between.
            stack.callback(patch._put_back, patch._own())
            setattr(patch.owner, patch.name, value)
        yield


def _guarded(patch: Patch, instead: Any) -> Any:
    original = patch.original
    if patch.all_threads:
        return instead
    if isinstance(instead, property):
        plain = original if isinstance(original, property) else None
        read = plain.fget if plain is not None else getattr(original, "__get__", None)
        write = plain.fset if plain is not None else getattr(original, "__set__", None)
        return property(here_only(instead.fget, read), here_only(instead.fset, write))
    return instead if isinstance(instead, type) else here_only(instead, original)


def here_only(instead: Any, original: Any) -> Any:
    """A function that is `instead` in this thread and `original` in every other one of Python's."""
    if not callable(instead) or not callable(original) or instead == original:
        return instead
    here, ident = threading.get_ident(), threading.get_ident

    @functools.wraps(original)
    def chosen(*args: Any, **options: Any) -> Any:
        if ident() == here or not _is_of_python():
            return instead(*args, **options)
        return original(*args, **options)

    return chosen


def caller() -> FrameType:
    """The frame that calls the replaced function which calls this one."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def hook_here(hook: Any) -> Any:
    """A hook of all modules or optimizers that PyTorch calls in this thread alone."""
    return here_only(hook, lambda *_, **__: None)


def _is_of_python() -> bool:
    """Whether Python has started this thread."""
    return not threading.current_thread().name.startswith("Dummy-")
