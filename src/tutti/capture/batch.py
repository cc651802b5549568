"""The arguments of a step: tensors and constants in any container, by position or by name."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.default_device import users_default
from tutti.capture.forms import flattened, holds_tensors, is_container
from tutti.capture.handed import (
    ArgumentsAhead,
    Batch,
    Place,
    arguments_in,
    by_path,
    handed_over,
    objects_in,
    path_text,
    unpacked,
)
from tutti.capture.keywords import Keywords
from tutti.capture.python.ways_out import of_error
from tutti.capture.unread import UnreadValue, is_unread, line_of_read, value_now
from tutti.errors import CaptureError
from tutti.torch_private.pytrees import tree_unflatten
from tutti.user_lines import quoted

Result = TypeVar("Result")
_SINGLE = (Tensor, np.ndarray, str, bytes)  # no sequences of arguments, though they can be iterated
_PLAIN = frozenset({Tensor, float, int, bool, str, type(None)})


def taken(batch: Any, keywords: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    """The batch of one call, keyword arguments as `Keywords` at the end; NumPy's numbers become Python's.

    A mapping as `batch` means `step(**batch)`.

    Raises `CaptureError` for a leaf that no trace can have, and for a batch that is no sequence of
    arguments.
    """
    if isinstance(batch, Mapping):
        batch, keywords = (), batch
    if isinstance(batch, _SINGLE) or not isinstance(batch, Sequence):
        raise _one_argument(batch)
    if not keywords and all(type(x) is Tensor for x in batch):
        return tuple(batch)
    whole = (*batch, Keywords(keywords)) if keywords else tuple(batch)
    leaves, form = flattened(whole)
    others = [x for x in leaves if type(x) not in _PLAIN]
    if others:
        as_they_are = objects_in(whole)
        for place, argument in arguments_in(whole):
            is_object = place in as_they_are
            inside = flattened(argument)[0]
            if (
                is_object
                and is_container(argument)
                and not isinstance(argument, dict | list | tuple)
            ):
                inside = []  # a trainer may hold its model
            for x in inside:
                check(x)
                if is_object and isinstance(x, np.ndarray):
                    raise _refused(x, _UNCOMPARED, "torch.as_tensor(x)")
    if any(isinstance(x, np.generic) for x in others):
        return tree_unflatten([_number(x) for x in leaves], form)
    return whole


def called(function: Callable[..., Any], args: Sequence[Any], batch: Sequence[Any]) -> Any:
    """Call the step on a batch from `taken`."""
    batch = unpacked(batch)
    with users_default():
        if batch and type(batch[-1]) is Keywords:
            return function(*args, *batch[:-1], **batch[-1])
        return function(*args, *batch)


def argument_name(function: Callable[..., Any], num_args: int, place: Place) -> str:
    """The name of an argument of the batch in the step's signature; `num_args` as for `name_of`."""
    return place if isinstance(place, str) else _parameter(function, num_args + place)


def with_arguments(
    function: Callable[[tuple[Any, ...]], Result],
    train_step: Callable[..., Any],
    optimizer: Any,
    batch: tuple[Any, ...],
) -> Result:
    """`function(batch)`, which captures the step: with the arguments that the step gets as they are."""
    num_args, places = 1 if optimizer is None else 2, objects_in(batch)
    while True:
        try:
            return function(
                handed_over(batch, places, {}, lambda p: argument_name(train_step, num_args, p))
            )
        except ArgumentsAhead as ahead:
            places |= ahead.places


def name_of(function: Callable[..., Any], num_args: int, batch: Sequence[Any], number: int) -> str:
    """The name of a batch's tensor in the step's signature: "x"; "batch[1]" for one of `*batch`.

    Args:
        num_args: the arguments of the step before the batch.
        number: that of the tensor, among those of the batch.
    """
    place, argument = argument_with(batch, number)
    whole = argument_name(function, num_args, place)
    return whole if isinstance(argument, Tensor) else f"{whole}[...]"


def argument_with(batch: Sequence[Any], number: int) -> tuple[Place, Any]:
    """The argument with a tensor of the batch, given by its number, and its place."""
    named = batch and type(batch[-1]) is Keywords
    given: dict[Place, Any] = dict(enumerate(batch[:-1] if named else batch))
    given |= {k: batch[-1][k] for k in sorted(batch[-1])} if named else {}
    for place, argument in given.items():
        count = sum(isinstance(x, Tensor) for x in flattened(argument)[0])
        if number < count:
            return place, argument
        number -= count
    raise AssertionError(number)


def _parameter(function: Callable[..., Any], place: int) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of an extension module
        return f"argument {place}"
    for k, one in enumerate(parameters):
        if one.kind is one.VAR_POSITIONAL:
            return f"{one.name}[{place - k}]"
        if k == place:
            return one.name
    return f"argument {place}"


def check(x: Any) -> None:
    """Raise `CaptureError` unless `x` may be a leaf of a batch."""
    if isinstance(x, Tensor | np.generic) or is_unread(x):
        return
    for kind, why, fix in _REFUSED:
        if isinstance(x, kind) and _matters(x):
            raise _refused(x, why, fix)


_ALONE = "its tensors alone: step(data.x, data.y)"
_UNCOMPARED = "what is not a tensor is a constant of the captured step, and this cannot be compared"
# Leaves that a batch may not have: the reason and the fix.
_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (
        nn.Module,
        "its weights would be constants of the captured step",
        'a dict as the model: tutti.distribute(step, {"student": model, "teacher": teacher}, optimizer)',
    ),
    (
        Optimizer,
        "its state would be constants of the captured step",
        'a dict or a list as the optimizer: tutti.distribute(step, model, {"g": one, "d": other})',
    ),
    (
        (torch.utils.data.DataLoader, torch.utils.data.Dataset, Iterator),
        "the captured step would see the same samples at every call",
        "for batch in loader: step(*batch)",
    ),
    (
        weakref.ref,
        "it refers to tensors, which would be constants of the captured step",
        _ALONE,
    ),
)


def _matters(x: Any) -> bool:
    if isinstance(x, weakref.ref):
        return holds_tensors(x())
    return not isinstance(x, nn.Module) or any(True for _ in (*x.parameters(), *x.buffers()))


def _refused(x: Any, why: str, fix: str) -> CaptureError:
    return CaptureError(
        f"the batch holds a {_type_name(x)}, which the step cannot take", why=why, fix=fix
    )


def read_refused(
    function: Callable[..., Any],
    num_args: int,
    batch: Batch,
    read: UnreadValue,
    leaf: Any,
    error: BaseException,
) -> CaptureError:
    """The error for a step that reads a value which cannot be compared, in place of the `leaf` of its batch;
    `error` is that of the read."""
    name = next(
        argument_name(function, num_args, place) + path_text(path)
        for place, argument in arguments_in(batch)
        for path, x in by_path(argument)
        if x is leaf
    )
    value = value_now(read)
    fix = "its tensors alone, and what Python reads as numbers and strings; of a set, frozenset(x)"
    if isinstance(value, np.ndarray):
        fix = f"a tensor in its place, before the call: torch.as_tensor({name})"
    return CaptureError(
        f"the step reads {name}, a {_type_name(value)}",
        at=quoted(line_of_read(read)) or of_error(error, "").at,
        why=f"{_UNCOMPARED} with that of another call; one that no code reads may stay",
        fix=fix,
    )


def _one_argument(batch: Any) -> CaptureError:
    return CaptureError(
        f"the batch is a {_type_name(batch)}, where the arguments of a call belong",
        why="its rows would be the arguments of the step" if isinstance(batch, _SINGLE) else "",
        fix="a tuple of the arguments, (x,) for a single one; a dict for arguments by name",
    )


def _type_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}"


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else x
