"""Temporary replacements of attributes of other libraries, each a value with its reason."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

_MISSING: Any = object()


@dataclass(frozen=True, eq=False)
class Patch:
    """An attribute to replace for a while.

    owner: the module, class or object that has it.
    reason: why, in one line.
    this_thread: other threads get the original meanwhile.
    create: the attribute need not exist before.
    """

    owner: Any
    name: str
    reason: str
    this_thread: bool = False
    create: bool = False

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
    if not patch.this_thread:
        return instead
    if not isinstance(instead, property):
        return here_only(instead, original)
    plain = original if isinstance(original, property) else None
    read = plain.fget if plain is not None else original.__get__
    write = plain.fset if plain is not None else original.__set__
    return property(here_only(instead.fget, read), here_only(instead.fset, write))


def here_only(instead: Any, original: Any) -> Any:
    """A function that is `instead` in this thread and `original` in every other one."""
    if instead == original:
        return original
    here, ident = threading.get_ident(), threading.get_ident
    plain: Callable[..., Any] = original

    @functools.wraps(original)
    def chosen(*args: Any, **options: Any) -> Any:
        return (instead if ident() == here else plain)(*args, **options)

    return chosen
