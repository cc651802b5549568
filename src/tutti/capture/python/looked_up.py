"""Numbers that a step looks up in a set or a dict: `if n in wanted`, `rates.get(n, rate)`, `rates[n]`.

A lookup needs a hash, and so one value: without more, each value of the number would have a trace. So the
trace compares the number with all keys. Its guard is that the number is none of them, or one of them if the
step asks for no value of a key.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import BooleanAtom
from torch.optim import lr_scheduler

from tutti.capture.patch_table import HASHES, INTEGER_EQUALITY
from tutti.capture.python.lookup_places import IS_MEMBER, Lookup, lookup_of
from tutti.capture.python.read_values import Symbols
from tutti.graph.edits.patch import Patch, caller
from tutti.torch_private.symbolic import SymNode, expression_of
from tutti.user_lines import is_users

MOST_KEYS = 512  # compared in one lookup
_PLAIN_KEYS = (int, bool, float, str, bytes, type(None))
_SETS = (set.__contains__, frozenset.__contains__, dict.__contains__)
_VALUES = (dict.__getitem__,)


class Lookups:
    """The lookups of symbols in one trace."""

    def __init__(self) -> None:
        # The instruction that has found a member, with the expression of the number.
        self._found: tuple[FrameType, int, Any] | None = None

    def patches(self) -> list[tuple[Patch, Callable[..., Any]]]:
        """A hash for a symbol in a lookup; a member's comparison with its key adds no guard."""
        plain, same = HASHES.original, INTEGER_EQUALITY.original

        def hashed(x: Any) -> int:
            env, frame = x.node.shape_env, caller()
            if not isinstance(env, Symbols) or not _is_followed(frame.f_code.co_filename):
                return plain(x)
            lookup = lookup_of(frame)
            if lookup is None or not _is_plain(lookup):
                env.hashed |= expression_of(x).free_symbols
                return plain(x)
            self._found = None
            is_member = _compared(x, lookup.container, env)
            if not is_member and _makes_values(lookup):
                env.hashed |= expression_of(x).free_symbols
                return plain(x)
            if is_member and lookup.kind == IS_MEMBER:
                self._found = frame, frame.f_lasti, expression_of(x)
            return hash(x.node.hint)

        def compared(x: Any, other: Any) -> Any:
            frame = caller() if self._found is not None else None
            if frame is not None and (frame, frame.f_lasti, expression_of(x)) == self._found:
                return x.node.hint == other
            return same(x, other)

        return [(HASHES, hashed), (INTEGER_EQUALITY, compared)]


def _is_followed(path: str) -> bool:
    return is_users(path) or path == lr_scheduler.__file__


def _is_plain(lookup: Lookup) -> bool:
    """Whether a lookup is Python's own, among keys that compare as numbers do."""
    container = lookup.container
    if not isinstance(container, set | frozenset | dict) or len(container) > MOST_KEYS:
        return False
    kind: Any = type(container)
    if lookup.kind == IS_MEMBER:
        is_own = kind.__contains__ in _SETS
    else:
        is_own = issubclass(kind, dict) and kind.__getitem__ in _VALUES and kind.get is dict.get
    return is_own and all(type(key) in _PLAIN_KEYS or _is_of_numpy(key) for key in container)


def _is_of_numpy(key: Any) -> bool:
    return isinstance(key, numbers.Real) and type(key).__module__ == "numpy"


def _makes_values(lookup: Lookup) -> bool:
    """Whether a lookup may call code of its dict for a key that it lacks: that may store the key."""
    kind = type(lookup.container)
    return lookup.kind != IS_MEMBER and hasattr(kind, "__missing__") and kind is not Counter


def _compared(x: Any, keys: Iterable[Any], env: Symbols) -> bool:
    """Whether a whole number is one of `keys`, as a branch of the trace."""
    some: list[Any] = [key for key in keys if isinstance(key, numbers.Real)]
    whole = [int(key) for key in some if key == key // 1]
    equal: list[Any] = [sympy.Eq(expression_of(x), key) for key in whole]
    found = sympy.Or(*equal)
    if isinstance(found, BooleanAtom):
        return bool(found)
    return bool(torch.SymBool(SymNode(found, env, bool, x.node.hint in whole)))
