"""What a step leaves in a model besides values: modes and hooks of modules, `requires_grad` of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from tutti.capture.patch_table import TRAINING
from tutti.capture.state.lift import StateTensor
from tutti.graph.edits.patch import replaced
from tutti.torch_private.module_tables import hooks_of_module


class Modes:
    """The modes of modules in a trace."""

    def __init__(self) -> None:
        self._read: set[int] = set()
        self._before: dict[int, tuple[nn.Module, Any]] = {}

    @property
    def are_others(self) -> bool:
        """Whether a module is left in another mode than the one that the step has read before it set it.

        A step that sets all modes first, by `model.train()`, is the same step in either mode.
        """
        return any(
            i in self._read and module.training != old for i, (module, old) in self._before.items()
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, note which modules' modes are read and set."""

        def get(module: nn.Module) -> Any:
            if id(module) not in self._before:
                self._read.add(id(module))
            try:
                return vars(module)["training"]
            except KeyError:
                raise AttributeError("training") from None

        def put(module: nn.Module, value: Any) -> None:
            self._before.setdefault(id(module), (module, vars(module).get("training")))
            vars(module)["training"] = value

        with replaced((TRAINING, property(get, put))):
            yield


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[list[tuple[nn.Module, bool]]]:
    """Restore the modes of all modules at the end; yields them."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield before
    finally:
        for module, training in before:
            module.training = training


class HooksBefore:
    """The hooks of all modules before a trace.

    A library may add hooks in its first call and note that in an attribute, which is restored after a trace:
    the next call would add them once more.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (table, dict(table)) for m in model.modules() for table in hooks_of_module(m)
        ]

    def put_back(self) -> None:
        """Remove hooks that have been added, and put back removed ones."""
        for table, before in self._before:
            if table.keys() != before.keys():
                table.clear()
                table.update(before)


@contextlib.contextmanager
def hooks_kept(model: nn.Module) -> Iterator[None]:
    """Restore the hooks of all modules at the end."""
    before = HooksBefore(model)
    try:
        yield
    finally:
        before.put_back()


def begin_trained(state: Sequence[StateTensor], fakes: Sequence[Any]) -> None:
    """Give each fake the `requires_grad` of its tensor: an earlier trace may have changed it."""
    for s, fake in zip(state, fakes, strict=False):
        if fake.requires_grad != s.tensor.requires_grad:
            fake.requires_grad_(s.tensor.requires_grad)


def left_trained(state: Sequence[StateTensor], fakes: Sequence[Any]) -> dict[str, bool]:
    """By name of a parameter, the `requires_grad` that the trace has left, where it is another one."""
    pairs = [(s, x) for s, x in zip(state, fakes, strict=False) if s.kind == "parameter"]
    return {s.name: x.requires_grad for s, x in pairs if x.requires_grad != s.tensor.requires_grad}
