"""Tables of an optimizer's Python values: the options of its groups, and its state of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.python.held_values import ITEM, MEMBER, SCOPE, Table
from tutti.capture.state.lift import names_of


def group_tables(optimizers: Sequence[Optimizer]) -> Iterator[Table]:
    """The options of each group; those that schedules change are inputs in any case."""
    for k, one in enumerate(optimizers):
        prefix = f"optim{k}" if k else "optim"
        for g, group in enumerate(one.param_groups):
            keys = [key for key, value in group.items() if key != "params"]
            yield Table(f"{prefix}.{g}.", MEMBER, partial(_group, one, g), keys)


def _group(one: Optimizer, g: int) -> Any:
    return one.param_groups[g]


def slot_tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Table]:
    """The state of each parameter besides tensors: numbers, lists of tensors; and state of no parameter."""
    owners = names_of(model)
    for k, one in enumerate(optimizers):
        if shared := [key for key in one.state if not isinstance(key, Tensor)]:
            prefix = f"optim{k}.state." if k else "optim.state."
            yield Table(prefix, SCOPE, partial(getattr, one, "state"), shared)
        for g, group in enumerate(one.param_groups):
            for j, param in enumerate(group["params"]):
                slots = one.state.get(param, {})
                keys = [k for k, v in slots.items() if not isinstance(v, Tensor)]
                if keys and id(param) in owners:
                    prefix, find = f"optim.{owners[id(param)]}.", partial(_slots_of, one, g, j)
                    yield Table(prefix, MEMBER, find, keys)
                    for key in keys:
                        yield from _inner_tables(
                            f"{prefix}{key}", partial(_in, find, key), slots[key]
                        )


def _inner_tables(prefix: str, find: Callable[[], Any], held: Any) -> Iterator[Table]:
    """The tables of a dict, list or tuple, and of those in it: loading a state replaces them."""
    if not isinstance(held, dict | list | tuple):
        return
    yield Table(prefix, ITEM, find, None)
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        yield from _inner_tables(f"{prefix}[{key!r:.40}]", partial(_in, find, key), value)


def holders(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Callable[[], list[Any]]]:
    """Functions that find the dicts of these values: `load_state_dict` and `state.clear()` replace them."""
    owners = names_of(model)
    found: list[Callable[[], list[Any]]] = []
    for one in optimizers:
        kept = [p for group in one.param_groups for p in group["params"] if id(p) in owners]
        counted = [
            p for p in kept if not all(isinstance(v, Tensor) for v in one.state.get(p, {}).values())
        ]
        found.append(partial(_holders, one, counted))
    return found


def _holders(one: Optimizer, params: Sequence[Tensor]) -> list[Any]:
    return [*one.param_groups, *map(one.state.get, params)]


def _in(find: Callable[[], Any], key: Any) -> Any:
    return find()[key]


def _slots_of(one: Optimizer, g: int, j: int) -> Any:
    return one.state[one.param_groups[g]["params"][j]]
