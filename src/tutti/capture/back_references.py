"""References of a container's parts back to the container, as a batch of PyTorch Geometric has them.

A pytree has no cycles: a flattened object leaves these references out, and the rebuilt one gets them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from tutti.torch_private.pytrees import register_pytree_node


@dataclass(frozen=True)
class BackReference:
    """Stands for a container that refers to itself.

    Args:
        weak: whether the reference is a weak one.
        inside: whether it is an attribute of a part, and not of the container.
    """

    weak: bool
    inside: bool

    def to(self, whole: Any) -> Any:
        """The reference to a rebuilt container."""
        return weakref.ref(whole) if self.weak else whole


register_pytree_node(
    BackReference, lambda x: ([], (x.weak, x.inside)), lambda _, form: BackReference(*form)
)


def without_back_references(whole: Any) -> dict[str, Any]:
    """The attributes of `whole`: where one, or an attribute of one, refers to `whole`, a `BackReference`."""
    return {name: _cut(value, whole) for name, value in vars(whole).items()}


def with_back_references(whole: Any) -> Any:
    """`whole`, rebuilt of such attributes, with its references."""
    for name, value in vars(whole).items():
        if isinstance(value, BackReference) and not value.inside:
            vars(whole)[name] = value.to(whole)
        for part in _parts(value):
            for key, inner in _attributes(part).items():
                if isinstance(inner, BackReference) and inner.inside:
                    vars(part)[key] = inner.to(whole)
    return whole


def _referred(value: Any, whole: Any, *, inside: bool) -> BackReference | None:
    """The stand-in for `value`, if it is a reference to `whole`."""
    weak = isinstance(value, weakref.ref)
    return BackReference(weak, inside) if (value() if weak else value) is whole else None


def _cut(value: Any, whole: Any) -> Any:
    """`value` without references to `whole`; a copy, where it or a part of it has one."""
    if found := _referred(value, whole, inside=False):
        return found
    cut = [_part_cut(x, whole) for x in _parts(value)]
    if all(a is b for a, b in zip(cut, _parts(value), strict=True)):
        return value
    if type(value) is dict:
        return dict(zip(value, cut, strict=True))
    return type(value)(cut) if type(value) in (list, tuple) else cut[0]


def _part_cut(part: Any, whole: Any) -> Any:
    found = {k: _referred(x, whole, inside=True) for k, x in _attributes(part).items()}
    found = {k: x for k, x in found.items() if x}
    if not found:
        return part
    kind: Any = type(part)
    made = kind.__new__(kind)
    vars(made).update(vars(part) | found)
    return made


def _parts(value: Any) -> Iterator[Any]:
    if type(value) is dict:
        yield from value.values()
    elif type(value) in (list, tuple):
        yield from value
    else:
        yield value


def _attributes(part: Any) -> dict[str, Any]:
    if isinstance(part, Tensor | nn.Module | type | ModuleType | FunctionType):
        return {}
    return getattr(part, "__dict__", None) or {}
