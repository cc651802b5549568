"""Attributes that users set on parameters and buffers (`p.is_expert = True`), which the step's code may read.

During a trace fakes stand in for these tensors. They have the same attributes, and what the step assigns to
them counts as an assignment to the tensors' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tutti.capture.state.lift import StateTensor
from tutti.errors import CaptureError
from tutti.torch_private.module_tables import OF_TENSORS, count_as_parameter

# Of PyTorch, and of tutti's shards.
NOT_OF_USERS = OF_TENSORS | {"origin", "now"}


def user_attributes(x: Tensor) -> dict[str, Any]:
    """By name, what the user has set on a tensor."""
    return {k: v for k, v in vars(x).items() if k not in NOT_OF_USERS}


def refuse_kinds(state: Sequence[StateTensor], names: frozenset[str]) -> None:
    """Refuse a parameter of a user's class if the step's code has a name of it: fakes have no such class.

    Args:
        names: those of globals and attributes in the step's code.
    """
    for s in state:
        _refuse_kind(f'"{s.name}"', s.tensor, names)


def refuse_in_batch(leaves: Sequence[Any], names: frozenset[str]) -> None:
    """Refuse a batch's tensor of a user's class, as `refuse_kinds`, or with an attribute that code names."""
    for k, x in enumerate(x for x in leaves if isinstance(x, Tensor)):
        _refuse_kind(f"batch tensor {k}", x, names)
        for key in user_attributes(x).keys() & names:
            raise CaptureError(
                f'batch tensor {k} has an attribute "{key}", and the step may depend on it',
                why="during a trace another tensor stands in for it; attributes are no part of a batch",
                fix="hand it to the step as an argument of its own",
            )


def _refuse_kind(which: str, x: Tensor, names: frozenset[str]) -> None:
    for kind in type(x).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "tutti", "builtins"):
            continue
        asked = [kind.__name__, *(k for k in vars(kind) if not k.startswith("__"))]
        if "__torch_function__" in vars(kind) or not names.isdisjoint(asked):
            raise CaptureError(
                f"{which} is a {kind.__name__}, and the step may depend on that",
                why="during a trace other tensors stand in for it, which are of no class of yours",
                fix="an ordinary tensor; a parameter may have an attribute instead, as p.is_expert = True",
            )


@dataclass(frozen=True)
class _StandIn:
    """A tensor of the state, the fake in its place, and the attributes of each before the step runs."""

    name: str
    tensor: Tensor
    fake: Any
    given: dict[str, Any]
    own: frozenset[str]

    @classmethod
    def of(cls, s: StateTensor, fake: Any) -> _StandIn:
        return cls(s.name, s.tensor, fake, user_attributes(s.tensor), frozenset(vars(fake)))


class TensorAttributes:
    """The attributes of the tensors of a trace and of the fakes in their place."""

    def __init__(self, state: Sequence[StateTensor], fakes: Sequence[Any]) -> None:
        pairs = zip(state, fakes, strict=False)
        self._all = [_StandIn.of(s, fake) for s, fake in pairs if s.kind != "slot"]

    @contextlib.contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Inside, the fakes have the attributes of the tensors, and those of parameters count as such."""
        try:
            for one in self._all:
                for key in one.own & one.given.keys():
                    raise CaptureError(
                        f'"{one.name}" has an attribute "{key}"',
                        why="during a trace another tensor stands in for it, which has its own",
                        fix=f"another name than {key}",
                    )
                vars(one.fake).update(one.given)
                if isinstance(one.tensor, nn.Parameter):
                    count_as_parameter(one.fake)
            yield
        finally:
            for one in self._all:
                for key in vars(one.fake).keys() - one.own:
                    del vars(one.fake)[key]

    def take_back(self, known: set[int]) -> None:
        """Assign to the tensors what the step has assigned to the fakes.

        Args:
            known: the ids of the tensors' tables whose values are restored after the trace.

        Raises:
            CaptureError: the step deletes an attribute, sets one that the tensor did not have, or sets one of
                the tensor itself, which it holds elsewhere.
        """
        for one in self._all:
            if past := _changed(one.given, user_attributes(one.tensor)):
                raise CaptureError(
                    f'the step sets the attribute "{past[0]}" of "{one.name}" past the model',
                    why="it holds the parameter itself, for which other tensors stand in during a trace",
                    fix="reach the parameter by the model, or as a default argument: def hook(grad, p=p)",
                )
            now = {k: v for k, v in user_attributes(one.fake).items() if k not in one.own}
            changed = _changed(one.given, now)
            if changed and id(vars(one.tensor)) not in known:
                raise CaptureError(
                    f'the step sets a new attribute of "{one.name}": {changed[0]}',
                    why="the step's Python runs once, while it is captured",
                    fix="set it before, to None or 0, so that calls of the step keep it",
                )
            if gone := [key for key in changed if key not in now]:
                raise CaptureError(
                    f'the step deletes an attribute of "{one.name}": {gone[0]}',
                    why="the step's Python runs once, while it is captured",
                    fix="set it to None",
                )
            vars(one.tensor).update({key: now[key] for key in changed})


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    missing = object()
    return [k for k in {**before, **now} if before.get(k, missing) is not now.get(k, missing)]
