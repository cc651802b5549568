"""Tensors that a step reaches outside of its model and optimizers, as state of its graph.

A criterion's weights, a teacher, a mean in a closure: to a trace they are constants. One in a known entry
becomes an input, like a buffer: a change of it counts, and the step's writes into it persist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.python.held_values import TableEntry
from tutti.capture.python.inputs import fake
from tutti.capture.state.lift import StateTensor
from tutti.errors import CaptureError
from tutti.torch_private.fake_tensors import FakeTensorMode


def lift_outside(
    traced: fx.GraphModule,
    entries: Mapping[int, TableEntry],
    stand_ins: Mapping[int, Tensor],
    num_state: int,
    mode: FakeTensorMode,
) -> tuple[list[StateTensor], list[Tensor], dict[str, TableEntry]]:
    """Make inputs of the constants of `traced` that are in `entries` (by id of the tensor).

    `stand_ins`, by the same ids, are their fakes in the trace; a tensor in a tuple that no entry holds
    appears as itself. The new placeholders follow the first `num_state` ones. Returns their state, their
    contiguous fakes, and their entries.
    """
    graph = traced.graph
    last = _last_state(graph, num_state)
    real = {i: i for i in entries} | {id(fake): i for i, fake in stand_ins.items()}
    made: dict[int, fx.Node] = {}
    state: list[StateTensor] = []
    fakes: list[Tensor] = []
    found: dict[str, TableEntry] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        known = real.get(id(getattr(traced, str(node.target))))
        if known is None:
            continue
        entry = entries[known]
        value = entry.get()
        if not may_be_input(value):
            setattr(traced, str(node.target), value)
            continue
        if known not in made:
            fakes.append(fake(value, mode))
            last = made[known] = _placeholder(graph, last, f"outside_{len(made)}", fakes[-1])
            state.append(StateTensor(entry.name, "buffer", value))
            found[entry.name] = entry
        node.replace_all_uses_with(made[known])
        graph.erase_node(node)
    return state, fakes, found


def refuse_written(outside: Mapping[str, TableEntry], updated: Sequence[str]) -> None:
    """Raise `CaptureError` for a step that writes into an outside tensor that does not fill its memory."""
    for name in updated:
        entry = outside.get(name)
        if entry is not None and not is_dense(entry.get()):
            raise CaptureError(
                f"the step writes into {name}, a part of another tensor",
                why="state of a step is a tensor that fills its memory",
                fix=f"{name} = {name}.contiguous() before the training",
            )
        if entry is not None and (other := _overlapping(name, outside)):
            raise CaptureError(
                f"the step writes into {name}, which shares memory with {other}",
                why="the step reads both: they are two values of its graph, and the write would change one",
                fix=f"{other} = {other}.clone() before the training; or one tensor in both places",
            )


def _overlapping(name: str, outside: Mapping[str, TableEntry]) -> str:
    """The name of another tensor in the memory of this one; "" for none."""
    first, end = _room(outside[name].get())
    for other, entry in outside.items():
        begin, last = _room(entry.get())
        if other != name and first < last and begin < end:
            return other
    return ""


def _room(x: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first element, and behind its last one."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size() * bool(x.numel())


def read_by(traced: fx.GraphModule) -> set[int]:
    """The ids of the constants that a trace reads."""
    nodes = (n for n in traced.graph.nodes if n.op == "get_attr" and n.users)
    return {id(getattr(traced, str(n.target))) for n in nodes}


def _last_state(graph: fx.Graph, num_state: int) -> fx.Node | None:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return placeholders[num_state - 1] if num_state else None


def _placeholder(graph: fx.Graph, after: fx.Node | None, name: str, fake: Tensor) -> fx.Node:
    at = (
        graph.inserting_after(after) if after is not None else graph.inserting_before(_first(graph))
    )
    with at:
        node = graph.placeholder(name)
    node.meta["val"] = fake
    return node


def _first(graph: fx.Graph) -> fx.Node:
    return next(iter(graph.nodes))


def may_be_input(value: Any) -> bool:
    """Whether an outside tensor can be an input of the graph; a trace uses any other directly."""
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return plain and value.device.type != "meta"


def is_dense(x: Tensor) -> bool:
    """Whether its elements fill their memory without overlap, in any order of dims."""
    dims = sorted((step, n) for n, step in zip(x.shape, x.stride(), strict=True) if n != 1)
    room = 1
    for step, n in dims:
        if step != room:
            return False
        room *= n
    return True
