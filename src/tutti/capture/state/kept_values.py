"""Tensors that modules keep besides their state: a capture runs their code once, so it refuses a tensor that
the next call reads again. Modules keep no value of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.errors import CaptureError
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.torch_private.module_tables import buffers_of
from tutti.torch_private.storages import memory_id
from tutti.torch_private.tracing import get_proxy_mode, get_proxy_slot

# Tables that every module has: of state, of modules and of hooks.
OF_ALL_MODULES = frozenset(nn.Module().__dict__)


@dataclass(frozen=True)
class Left:
    """A value of the trace left in a module under `name`, in place of `before`."""

    name: str
    before: Any
    value: FakeTensor
    varies: bool  # with the state, the batch or random numbers: differs between calls


class Attributes:
    """The values of modules besides their state: attributes, and their dicts and lists."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, Any, Any]] = []
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            tables = {k: v for k, v in vars(module).items() if type(v) in (dict, list)}
            own = [(f"{prefix}{k}.", v) for k, v in tables.items() if k not in OF_ALL_MODULES]
            for name, table in [(prefix, vars(module)), (prefix, buffers_of(module)), *own]:
                self._held.append((name, table, table.copy()))

    def left(self, stand_ins: Mapping[int, Tensor]) -> list[Left]:
        """The values of the current trace left in places that held no tensor.

        `stand_ins` are its fakes of the tensors that were there before.
        """
        found: list[Left] = []
        fakes = {id(x) for x in stand_ins.values()}
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        for prefix, table, before in self._held:
            was = dict(_entries(before))
            for key, value in _entries(table):
                if not isinstance(value, FakeTensor) or id(value) in fakes:
                    continue
                if value is not was.get(key) and not isinstance(was.get(key), Tensor):
                    slot: Any = get_proxy_slot(value, tracer, None)
                    old = was.get(key)
                    varies = slot is not None and _varies(slot.proxy.node, tracer.root, old)
                    found.append(Left(f"{prefix}{key}", old, value, varies))
        return found

    def put_back(self) -> None:
        """Restore the values from before the trace."""
        for _, table, before in self._held:
            if isinstance(table, list):
                if any(isinstance(x, FakeTensor) for x in table):
                    table[:] = before
                continue
            for key in [k for k, value in table.items() if isinstance(value, FakeTensor)]:
                del table[key]
                table.update({key: before[key]} if key in before else {})


def refuse_kept_values(left: list[Left], trace_again: Callable[[], fx.GraphModule]) -> None:
    """Raise if the step reads a value that an earlier call has left in a module.

    A second trace, which starts with the values left by the first, decides it.
    """
    kept, read = [x for x in left if x.varies], []
    if kept:
        stood = _storages(trace_again())
        read = [x for x in kept if _storage(x.value) in stood]
    if read:
        name = read[0].name
        raise CaptureError(
            f'the step keeps a tensor in "{name}" from one call to the next',
            why="the step is captured once: it would read the value of that call for ever",
            fix=f'self.register_buffer("{name.rpartition(".")[2]}", its first value)',
        )


def _storages(traced: fx.GraphModule) -> set[int]:
    """The storages of the constant tensors that a trace reads."""
    found = [
        getattr(traced, n.target) for n in traced.graph.nodes if n.op == "get_attr" and n.users
    ]
    return {_storage(x) for x in found if isinstance(x, Tensor)}


def _storage(x: Tensor) -> int:
    return memory_id(x)


def _entries(table: Any) -> list[tuple[Any, Any]]:
    return list(table.items() if isinstance(table, dict) else enumerate(table))


def _varies(node: fx.Node, root: nn.Module, before: Any) -> bool:
    """Whether a value differs between calls: it depends on an input of the graph, is random, or changes
    `before`."""
    own = _storage(before) if isinstance(before, Tensor) else None
    seen: set[tuple[fx.Node, bool]] = set()
    todo = [(node, False)]
    while todo:
        x, changed = todo.pop()
        if (x, changed) in seen:
            continue
        seen.add((x, changed))
        if x.op == "placeholder" or torch.Tag.nondeterministic_seeded in getattr(
            x.target, "tags", ()
        ):
            return True
        if x.op == "get_attr" and changed and _storage(getattr(root, str(x.target))) == own:
            return True
        name = str(x.target)
        if not name.startswith(_OF_FORM):
            todo += [(y, changed or not name.startswith(_SAME)) for y in x.all_input_nodes]
    return False


# Ops that read the form of an operand, not its values; and ops that change no value.
_OF_FORM = tuple(
    f"aten.{form}."
    for kind in ("zeros", "ones", "full", "empty")
    for form in (f"{kind}_like", f"new_{kind}")
)
_SAME = ("aten._to_copy.", "aten.detach.", "aten.clone.", "aten.alias.", "aten.lift_fresh")
