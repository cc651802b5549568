"""Layers that repeat: finds them in a model, and shortens the model for a while.

    layers   dense dense dense moe moe moe moe ... moe        61 of them
    runs     3 of one                  58 of one
    short    dense dense moe moe                              two of each

Layers are equal if their modules, parameters, buffers and plain options are. A run may repeat a unit of
several layers (local and global attention in turns).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from tutti.capture.state.lift import optimizers_of
from tutti.torch_private.module_tables import children_of

# A shorter run is not worth it.
LEAST_REPEATS = 5
_MOST_UNIT = 8
# Attributes that number a layer: they differ between equal ones.
_NUMBERS = re.compile(r"(idx|index|layer_?id|layer_?number|_i|number)$")


@dataclass(frozen=True)
class Run:
    """`repeats` equal units of `unit` layers each, from the layer `start` of the container `path`."""

    path: str
    start: int
    unit: int
    repeats: int

    @property
    def num_layers(self) -> int:
        """Layers of the whole run."""
        return self.unit * self.repeats


class ShortUnits:
    """The units of each run in a short model, by the names of its modules and parameters."""

    # Whether an operation between two units belongs to the first of them.
    fills_gaps = False

    def __init__(self, runs: Sequence[Run], repeats: Mapping[Run, int]) -> None:
        self._numbers: list[tuple[Run, int, int]] = []
        gone: dict[str, int] = {}
        for run in runs:
            short = run.unit * repeats[run]
            start = run.start - gone.get(run.path, 0)
            gone[run.path] = gone.get(run.path, 0) + run.num_layers - short
            self._numbers.append((run, start, start + short))
        # (units in the program, layers of a unit, layers of the model) of each run.
        self.runs = tuple((repeats[run], run.unit, run.num_layers) for run in runs)

    def of(self, name: str) -> tuple[int, int] | None:
        """The position of the run and of the unit in it; None outside of all runs."""
        for i, (run, begin, end) in enumerate(self._numbers):
            head = f"{run.path}." if run.path else ""
            if not name.startswith(head):
                continue
            number = name[len(head) :].partition(".")[0]
            if number.isdecimal() and begin <= int(number) < end:
                return i, (int(number) - begin) // run.unit
        return None

    def child(self, name: str) -> tuple[int, str] | None:
        """The layer in its unit, and the child of it with this name; None for a layer itself."""
        found = self.of(name)
        if found is None:
            return None
        run, begin, _ = self._numbers[found[0]]
        number, _, rest = name[len(run.path) + bool(run.path) :].partition(".")
        return ((int(number) - begin) % run.unit, rest.partition(".")[0]) if rest else None

    def stands_for(self, name: str) -> int:
        """How many units of the model a module or a parameter of the short one stands for: the last unit of a
        run for all that are left out, too."""
        found = self.of(name)
        if found is None:
            return 1
        run, number = found
        count, unit, num_layers = self.runs[run]
        return num_layers // unit - count + 1 if number == count - 1 else 1


def runs_of(model: nn.Module) -> tuple[Run, ...]:
    """The runs of a model, in the order of its containers; none inside of another."""
    found: list[Run] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if len(module) >= LEAST_REPEATS and not any(_is_inside(path, run) for run in found):
            # None in place of a layer equals no other.
            forms = [object() if layer is None else _form(layer) for layer in module]
            found.extend(_runs(path, forms))
    return tuple(found)


@contextmanager
def shortened(model: nn.Module, optimizer: Any, repeats: Mapping[Run, int]) -> Iterator[None]:
    """Context in which the model has so many units of each run, and the optimizer their parameters only.

    At its end both are as before.
    """
    kept_children: list[tuple[Any, dict[str, Any]]] = []
    kept_groups = [(one, list(one.param_groups)) for one in optimizers_of(optimizer)]
    by_path: dict[str, list[Run]] = {}
    for run in repeats:
        by_path.setdefault(run.path, []).append(run)
    try:
        for path, runs in by_path.items():
            children = children_of(model.get_submodule(path))
            kept_children.append((children, dict(children)))
            layers = _shortened(list(children.values()), runs, repeats)
            children.clear()
            children.update({str(i): layer for i, layer in enumerate(layers)})
        left = {id(p) for p in model.parameters()}
        for one, groups in kept_groups:
            one.param_groups[:] = _left(groups, left)
        yield
    finally:
        for children, whole in kept_children:
            children.clear()
            children.update(whole)
        for one, groups in kept_groups:
            one.param_groups[:] = groups


def _shortened(
    layers: Sequence[nn.Module], runs: Sequence[Run], repeats: Mapping[Run, int]
) -> list[nn.Module]:
    left_out = set()
    for run in runs:
        left_out |= set(range(run.start + run.unit * repeats[run], run.start + run.num_layers))
    return [layer for i, layer in enumerate(layers) if i not in left_out]


def _left(groups: Sequence[dict[str, Any]], left: set[int]) -> list[dict[str, Any]]:
    shorter = [{**g, "params": [p for p in g["params"] if id(p) in left]} for g in groups]
    return [g for g in shorter if g["params"]]


def _is_inside(path: str, run: Run) -> bool:
    return path.startswith(f"{run.path}.")


def _runs(path: str, forms: Sequence[Any]) -> Iterator[Run]:
    at = 0
    while at < len(forms):
        unit, repeats = max(
            ((unit, _repeats(forms, at, unit)) for unit in range(1, _MOST_UNIT + 1)),
            key=lambda found: (found[0] * found[1] if found[1] >= LEAST_REPEATS else 0, -found[0]),
        )
        if repeats >= LEAST_REPEATS:
            yield Run(path, at, unit, repeats)
            at += unit * repeats
        else:
            at += 1


def _repeats(forms: Sequence[Any], at: int, unit: int) -> int:
    count = 1
    while list(forms[at + count * unit : at + (count + 1) * unit]) == list(forms[at : at + unit]):
        count += 1
    return count


def _form(layer: nn.Module) -> Any:
    """What two equal layers have in common."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(n, tuple(x.shape), x.dtype, x.requires_grad) for n, x in tensors]
        plain = sorted(
            (k, v)
            for k, v in vars(module).items()
            if isinstance(v, int | float | str | bool | None) and not _NUMBERS.search(k)
        )
        found.append((name, type(module), shapes, [(k, repr(v)) for k, v in plain]))
    return found
