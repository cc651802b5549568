"""The numbers of optimizers' groups in checkpoints, such as the learning rate of now.

A scheduler changes them step by step, and does not restore them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from tutti.capture.state.lift import optimizers_of
from tutti.errors import CheckpointError
from tutti.user_lines import users_level

# By optimizer, the entries of each group.
Groups = list[list[dict[str, Any]]]
# Entries of a parameter group that are no state: parameters, and forms of one computation.
_NO_STATE = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_TENSOR = "tensor"


def groups_of(optimizer: Any) -> Groups:
    """The hyper-parameters of each group of each optimizer."""
    return [
        [
            {k: x for k, x in group.items() if k not in _NO_STATE and not callable(x)}
            for group in one.param_groups
        ]
        for one in optimizers_of(optimizer)
    ]


def check_groups(optimizer: Any, name: str, saved: Groups) -> None:
    """Raise `CheckpointError` unless the saved groups are as many as those of the step `name`."""
    here, there = _counts(optimizer), [len(groups) for groups in saved]
    if here != there:
        raise CheckpointError(
            f'the optimizer of "{name}" has other parameter groups than when it was saved',
            why=f"groups of each optimizer: {there} there, {here} here",
            fix="build the same optimizer as when it was saved",
        )


def put_groups(optimizer: Any, saved: Groups) -> None:
    """Set the saved hyper-parameters; a tensor keeps its identity."""
    for one, groups in zip(optimizers_of(optimizer), saved, strict=True):
        for group, found in zip(one.param_groups, groups, strict=True):
            for key in found.keys() & group.keys() - set(_NO_STATE):
                if isinstance(group[key], Tensor) and isinstance(found[key], Tensor):
                    with torch.no_grad():
                        group[key].copy_(found[key])
                else:
                    group[key] = found[key]


def to_json(optimizer: Any) -> list[Any]:
    """The groups for a manifest: numbers, texts, and sequences of them."""
    return [
        [{k: _packed(x) for k, x in group.items() if _is_packable(x)} for group in groups]
        for groups in groups_of(optimizer)
    ]


def take_over(optimizer: Any, saved: list[Any]) -> None:
    """Set the groups of a manifest; warns if the optimizer has others, and leaves them as they are."""
    if not saved:  # of a tutti that did not save them
        return
    here, there = _counts(optimizer), [len(groups) for groups in saved]
    if here != there:
        warnings.warn(
            f"the optimizer has other parameter groups than when it was saved ({there} there, {here} "
            "here): learning rates, and their other numbers, stay those of the script",
            stacklevel=users_level(),
        )
        return
    put_groups(
        optimizer,
        [[{k: _unpacked(x) for k, x in group.items()} for group in groups] for groups in saved],
    )


def _counts(optimizer: Any) -> list[int]:
    return [len(one.param_groups) for one in optimizers_of(optimizer)]


def _is_packable(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return all(map(_is_packable, x))
    return isinstance(x, Tensor | int | float | str | None)


def _packed(x: Any) -> Any:
    if isinstance(x, Tensor):
        return {_TENSOR: x.tolist()}
    return {"tuple": [*map(_packed, x)]} if isinstance(x, tuple) else x


def _unpacked(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    return torch.tensor(x[_TENSOR]) if _TENSOR in x else tuple(map(_unpacked, x["tuple"]))
