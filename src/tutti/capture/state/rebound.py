"""State that a step rebinds instead of writing into it: `self.mean = 0.9 * self.mean + x`, `p.data = y`.

A trace identifies a state tensor by its object, and would not see another in its place. So capture writes the
new tensor's values into the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from tutti.capture.patch_table import DATA
from tutti.capture.state.lift import StateTensor, SwappedTensor
from tutti.errors import CaptureError
from tutti.graph.edits.patch import hook_here, replaced
from tutti.torch_private.tracing import get_proxy_mode, get_proxy_slot
from tutti.user_lines import quoted, user_line

_DATA: Any = Tensor.data


def take_over(
    places: Sequence[SwappedTensor],
    state: Mapping[int, StateTensor],
    shared: Mapping[int, Tensor],
    assigned: Mapping[int, str],
) -> list[str]:
    """Write into each state tensor the tensor that the step has put in its place.

    Returns the names of those that share another's memory after the step.

    Args:
        state: state tensors by the id of their tensor in the trace.
        shared: by the id of a tensor, the one that has since shared its memory (`x.data = value`).
        assigned: by the id of a value, the line that has assigned it to a module.

    Raises:
        CaptureError: for a parameter, for a value of another shape or dtype, and for state of another size.
    """
    found: dict[int, list[Any]] = {}
    for place in places:
        found.setdefault(id(place.put), []).append(place.now())
    puts = {id(place.put): place.put for place in places}
    new: list[tuple[Tensor, Tensor]] = []
    sharing: list[str] = []
    with torch.no_grad():
        for i, values in found.items():
            _refuse_resized(state[i], puts[i])
            if all(value is puts[i] for value in values):
                continue
            at = _line_of(next(x for x in values if x is not puts[i]), assigned)
            _refuse_other(state[i], puts[i], values, at)
            value = shared.get(id(values[0]), values[0])
            sharing += [state[i].name] if value is not values[0] else []
            new.append((puts[i], value.detach().clone()))  # two may be swapped
        for put, value in new:
            put.copy_(value)
    return sharing


def refuse_read(placeholders: Mapping[str, fx.Node], sharing: Sequence[str]) -> None:
    """Raise `CaptureError` for state that has a weight's memory after the step if the next step reads it."""
    for name in (name for name in sharing if placeholders[name].users):
        raise CaptureError(
            f'"{name}" is a weight\'s memory after the step (`p.data = value`), and the next one reads it',
            why="the captured step has a value for each of them",
            fix="p.copy_(value)",
        )


def _refuse_resized(entry: StateTensor, put: Tensor) -> None:
    before, now = list(entry.tensor.shape), list(put.shape)
    if before != now:
        raise CaptureError(
            f'the step resizes "{entry.name}" from {before} to {now}',
            why="state keeps its shape and dtype: the next step is the same",
            fix="make it so from the beginning; if only the first call of the model does it (observers of "
            "torch.ao.quantization), call the model on a batch before tutti.distribute",
        )


def _refuse_other(entry: StateTensor, put: Tensor, values: list[Any], at: str) -> None:
    if entry.kind == "parameter":
        name = entry.name.rpartition(".")[2]
        raise CaptureError(
            f'the step replaces the parameter "{entry.name}"',
            at=at,
            why="the optimizer would go on with the one before",
            fix=f"write into it: self.{name}.data.copy_(value), or with torch.no_grad(): "
            f"self.{name}.copy_(value)",
        )
    if any(value is not values[0] for value in values):
        raise CaptureError(
            f'the step replaces "{entry.name}" in one of the modules that share it',
            at=at,
            why="from then on these would be two buffers",
            fix="buffer.copy_(value)",
        )
    value = values[0]
    if value is None and entry.kind == "slot":
        raise CaptureError(
            f'the step removes "{entry.name}" from the state of the optimizer',
            at=at,
            why="a step is captured with this state, and is the same at every call",
            fix=f'optimizer.state[p]["{entry.slot}"].zero_() in place of state.clear() or .pop(p); or remove '
            "it between two calls of the step",
        )
    if not isinstance(value, Tensor):
        raise CaptureError(
            f'the step replaces "{entry.name}" by {value!r:.40}',
            at=at,
            why="state keeps its shape and dtype: the next step is the same",
            fix="a tensor of the same shape",
        )
    _refuse_other_form(f'"{entry.name}"', put, value, at)


def _refuse_other_form(name: str, old: Tensor, new: Tensor, at: str = "") -> None:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise CaptureError(
            f"the step replaces {name}, {list(old.shape)} {old.dtype}, by {list(new.shape)} {new.dtype}",
            at=at,
            why="state keeps its shape and dtype: the next step is the same",
            fix="make it so from the beginning",
        )


def _line_of(value: Any, assigned: Mapping[int, str]) -> str:
    """The line that has assigned a value to a module, or else the one that has made it, with its text."""
    mode = get_proxy_mode()
    slot = None
    if id(value) not in assigned and isinstance(value, Tensor) and mode is not None:
        slot = get_proxy_slot(value, mode.tracer, None)
    made = "" if slot is None else slot.proxy.node.meta.get("source", "")
    return quoted(assigned.get(id(value), made))


@contextlib.contextmanager
def assignments_noted() -> Iterator[Mapping[int, str]]:
    """Inside, on this thread, note the lines that assign parameters and buffers to modules.

    Yields a map from the id of each value to its line.
    """
    lines: dict[int, str] = {}
    kept: list[Any] = []  # so that no id repeats

    def note(_module: nn.Module, _name: str, value: Any) -> None:
        lines[id(value)] = user_line()
        kept.append(value)

    hooks = [
        register_module_parameter_registration_hook(hook_here(note)),
        register_module_buffer_registration_hook(hook_here(note)),
    ]
    try:
        yield lines
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def data_written() -> Iterator[Mapping[int, Tensor]]:
    """Inside, on this thread, `x.data = value` writes the values into `x`, where a trace sees it.

    Yields a map from the id of each `value` to the `x` that shares its memory from then on.
    """
    shared: dict[int, Tensor] = {}
    last: dict[int, int] = {}  # id of each `x` -> id of its last `value`
    kept: list[Tensor] = []  # so that no id repeats

    def write(x: Tensor, value: Tensor) -> None:
        _refuse_other_form("a tensor's data", x, value, quoted(user_line()))
        with torch.no_grad():
            _DATA.__get__(x).copy_(value)
        shared.pop(last.get(id(x), 0), None)
        shared[id(value)], last[id(x)] = x, id(value)
        kept.append(value)

    with replaced((DATA, property(_DATA.__get__, write))):
        yield shared
