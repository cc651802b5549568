"""The set or dict of a lookup, found from the hash of its key."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tutti.capture.python.lookup_places import IS_MEMBER, VALUE, Lookup, lookup_of

WANTED = {1, 2, 3}
RATES = {1: 2.0, 3: 4.0}


class _Asked(int):
    """A number that notes the lookup for which it is asked a hash."""

    found: Lookup | None = None

    def __hash__(self) -> int:
        type(self).found = lookup_of(sys._getframe(1))
        return int.__hash__(self)


class _Slots:
    __slots__ = ("rates",)

    def __init__(self) -> None:
        self.rates = RATES


class _Computed:
    @property
    def wanted(self) -> set[int]:
        raise AssertionError("not asked twice")


def _of(function: Any, *given: Any) -> Lookup | None:
    _Asked.found = None
    function(_Asked(1), *given)
    return _Asked.found


NESTED = SimpleNamespace(inner=SimpleNamespace(wanted=WANTED))
MODULE = nn.Module()
MODULE.inner = nn.Module()
MODULE.inner.wanted = WANTED  # type: ignore[assignment]


@pytest.mark.parametrize(
    "function, given, kind, container",
    [
        (lambda n: n in WANTED, (), IS_MEMBER, WANTED),
        (lambda n: n not in WANTED, (), IS_MEMBER, WANTED),
        (lambda n: n in {1, 2}, (), IS_MEMBER, {1, 2}),
        (lambda n, local: n in local, (WANTED,), IS_MEMBER, WANTED),
        (lambda n, local: [n in local for _ in (1, 2)], (WANTED,), IS_MEMBER, WANTED),
        (lambda n: 0 < n in WANTED, (), IS_MEMBER, WANTED),
        (lambda n: n in NESTED.inner.wanted, (), IS_MEMBER, WANTED),
        (lambda n: n in MODULE.inner.wanted, (), IS_MEMBER, WANTED),  # type: ignore[union-attr]
        (lambda n: RATES[n], (), VALUE, RATES),
        (lambda n, flag: 1 if flag else RATES[n], (False,), VALUE, RATES),
        (lambda n, local: local[n], (RATES,), VALUE, RATES),
        (lambda n: 3 * RATES.get(n), (), VALUE, RATES),  # type: ignore[operator]
        (lambda n: 3 * RATES.get(n, n + 1), (), VALUE, RATES),
        (lambda n: RATES.get(n, len("two")), (), VALUE, RATES),
        (lambda n, slots: slots.rates.get(n, 1.0), (_Slots(),), VALUE, RATES),
    ],
)
def test_a_lookup_is_found(
    function: Any, given: tuple[Any, ...], kind: str, container: Any
) -> None:
    assert _of(function, *given) == Lookup(kind, container)


@pytest.mark.parametrize(
    "function, given",
    [
        (lambda n: {n: 1}, ()),
        (lambda n: {n, 5}, ()),
        (lambda n: hash(n), ()),
        (lambda n: (lambda: WANTED)().__contains__(n), ()),
        (lambda n: n in {*range(3)}, ()),
        (lambda n: {}.setdefault(n, 2), ()),
        (lambda n: RATES.copy().pop(n), ()),
        (lambda n, flag: RATES.get(n if flag else 1, 2), (True,)),
        (lambda n, flag: RATES[n if flag else 1], (True,)),
        (lambda n, flag: RATES.get(n, 1 if flag else 2), (True,)),
        (lambda n, flag: n in (WANTED if flag else RATES), (True,)),
        (lambda n, flag: n in (WANTED if flag else RATES), (False,)),
    ],
)
def test_nothing_else_is_one(function: Any, given: tuple[Any, ...]) -> None:
    assert _of(function, *given) is None


def test_a_property_is_not_asked() -> None:
    assert _found_in(_Computed()) is None


def _found_in(owner: Any) -> Lookup | None:
    _Asked.found = None
    try:
        _Asked(1) in owner.wanted  # noqa: B015
    except AssertionError:
        return _Asked.found
    raise AssertionError
