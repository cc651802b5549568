"""The containers of a batch or a result, those unknown to PyTorch's pytrees included.

It flattens dataclasses, `BatchEncoding`, packed sequences, caches and plain objects that hold tensors, and
rebuilds them from other leaves. It registers their types with PyTorch's pytrees at first sight.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Awaitable, Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tutti.capture.back_references import (
    BackReference,
    with_back_references,
    without_back_references,
)
from tutti.capture.unread import is_unread, value_before, value_now
from tutti.errors import CaptureError
from tutti.torch_private.pytrees import (
    SUPPORTED_NODES,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_unflatten,
)

# Types that are leaves.
_WHOLE = (
    Tensor,
    nn.Module,
    Optimizer,
    DataLoader,
    Iterator,
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)
_IN_GRAPHS = (Tensor, torch.SymFloat, torch.SymInt, int, float, complex, type(None))
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
# The most objects inside of one in which to look for tensors.
_LOOKED_AT = 2000

Parts = tuple[list[Any], Any]


def flattened(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a batch or a result, and its form; every tensor is a leaf, and no other leaf holds one.

    Raises `CaptureError` for an object that holds tensors and itself.
    """
    try:
        leaves, form = tree_flatten(value)
        while any(_made_known(x) for x in leaves if not isinstance(x, _WHOLE)):
            leaves, form = tree_flatten(value)
    except RecursionError:
        raise CaptureError(
            "an argument or result of the step holds tensors and itself",
            why="it cannot be taken apart into tensors",
            fix="hand over its tensors: step(data.x, data.y)",
        ) from None
    return leaves, form


class KeptConstant:
    """A returned leaf that is neither a tensor nor a number: the same at every call, or one of the batch."""

    def __init__(self, value: Any) -> None:
        self.value = value


register_pytree_node(KeptConstant, lambda x: ([], x), lambda _, x: value_now(x.value))


def form_of(spec: TreeSpec) -> Any:
    """The form of a result in parts, to compare: a symbol in it is no number."""
    made = spec.context
    if isinstance(made, KeptConstant):
        made = [type(made), value_before(made.value)]
    return spec.type, made, [form_of(x) for x in spec.children()]


def returnable(result: Any) -> Any:
    """The result of a step, with each constant unknown to a graph as a `KeptConstant`.

    Raises `CaptureError` for an iterator, which would be empty from the second call on.
    """
    leaves, form = flattened(result)
    if all(map(_is_in_graphs, leaves)):
        return result
    # A condition keeps its value, under a guard.
    leaves = [bool(x) if isinstance(x, torch.SymBool) else x for x in leaves]
    for x in leaves:
        if isinstance(x, Iterator | Awaitable):
            raise CaptureError(
                f"the step returns a {type(x).__name__}",
                why="Python runs once, while the step is captured: it would be empty at the next call",
                fix="return a list: [...] instead of (... for ...); def instead of async def; no yield",
            )
    return tree_unflatten([x if _is_in_graphs(x) else KeptConstant(x) for x in leaves], form)


def _is_in_graphs(x: Any) -> bool:
    return isinstance(x, _IN_GRAPHS) and not is_unread(x)


def _made_known(x: Any) -> bool:
    """Register the type of `x` if it is an unknown container of tensors; return whether it was."""
    kind = type(x)
    if kind in SUPPORTED_NODES or is_unread(x) or not (_is_record(x) or holds_tensors(x)):
        return False
    apart, together = _ways_of(x)
    register_pytree_node(kind, apart, together)
    return True


def holds_tensors(x: Any) -> bool:
    """Whether an object, or one inside of it, is a tensor."""
    todo, seen = [x], {id(x)}
    for one in todo:
        if isinstance(one, Tensor):
            return True
        if isinstance(one, _WHOLE) or len(todo) > _LOOKED_AT:
            continue
        for inner in _inside(one):
            if id(inner) not in seen:
                seen.add(id(inner))
                todo.append(inner)
    return False


def _is_record(x: Any) -> bool:
    """Whether an object has no hash, and attributes that are plain values: it is no constant as a whole."""
    if type(x).__hash__ is not None or not hasattr(x, "__dict__"):
        return False
    found = [*_inside(x)]
    for one in found:
        if type(one) in (dict, list, tuple) and len(found) <= _LOOKED_AT:
            found += _inside(one)
        elif not isinstance(one, (*_PLAIN, BackReference)):
            return False
    return True


def _inside(x: Any) -> Iterator[Any]:
    return (inner for _, inner in entries_of(x))


@dataclasses.dataclass(frozen=True)
class Attribute:
    """The key of an attribute, beside those of items."""

    name: str


def is_container(x: Any) -> bool:
    """Whether `flattened` takes a value apart."""
    return type(x) in SUPPORTED_NODES or _is_named_tuple(x)


def _is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def entries_of(x: Any) -> Iterator[tuple[Any, Any]]:
    """The items and attributes of an object, by key."""
    if isinstance(x, dict | UserDict):
        yield from x.items()
    elif isinstance(x, list | tuple | deque):
        yield from enumerate(x)
    if dataclasses.is_dataclass(x):
        names = [f.name for f in dataclasses.fields(x)]
        yield from ((Attribute(name), getattr(x, name, None)) for name in names)
    if hasattr(x, "__dict__"):
        yield from ((Attribute(name), inner) for name, inner in vars(x).items())


def _ways_of(x: Any) -> tuple[Callable[[Any], Parts], Callable[[Any, Any], Any]]:
    """The functions that flatten and rebuild a container like `x`."""
    kind = type(x)
    if isinstance(x, UserDict):
        return _entries, lambda parts, keys: _dressed(kind, {"data": _paired(keys, parts)})
    if isinstance(x, dict):
        return _entries, lambda parts, keys: _filled(kind, _paired(keys, parts))
    if isinstance(x, tuple):
        return lambda x: ([*x], None), lambda parts, _: tuple.__new__(kind, parts)
    if isinstance(x, list):
        return lambda x: ([*x], None), lambda parts, _: _extended(kind, parts)
    if hasattr(x, "__dict__"):
        return _attributes, lambda parts, keys: _whole(kind, _paired(keys, parts))
    return _fields, lambda parts, keys: _with_fields(kind, _paired(keys, parts))


def _entries(x: Any) -> Parts:
    return [*x.values()], tuple(x)


def _attributes(x: Any) -> Parts:
    own = without_back_references(x)
    return [*own.values()], tuple(own)


def _fields(x: Any) -> Parts:
    names = tuple(f.name for f in dataclasses.fields(x))
    return [getattr(x, n) for n in names], names


def _paired(keys: Any, parts: Any) -> dict[Any, Any]:
    return dict(zip(keys, parts, strict=True))


def _whole(kind: Any, attributes: dict[str, Any]) -> Any:
    return with_back_references(_dressed(kind, attributes))


def _dressed(kind: Any, attributes: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


def _filled(kind: Any, entries: dict[Any, Any]) -> Any:
    made = kind.__new__(kind)
    for key, value in entries.items():
        dict.__setitem__(made, key, value)
    return made


def _extended(kind: Any, parts: Any) -> Any:
    made = kind.__new__(kind)
    list.extend(made, parts)
    return made


def _with_fields(kind: Any, entries: dict[Any, Any]) -> Any:
    made = object.__new__(kind)
    for key, value in entries.items():
        object.__setattr__(made, key, value)
    return made
