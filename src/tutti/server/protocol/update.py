"""A server's view of an optimizer: variables with their state, and three functions.

A server never receives code. It runs the user's script as the workers do, captures the same step, and
extracts its update:

    gradient of each block --sums--> add up over all blocks --scalars--> one set of numbers for the step
    state, gradient, numbers of a block --update--> state

The servers hold a variable in *blocks*. A block of an elementwise variable (`divisible`) is a 1-D tensor
`[start:stop]` of the flat variable; of a table whose rows travel alone (`rows`) it is
`[stop - start, *shape[1:]]`; of any other it is the whole variable, in its own shape. The cut also applies to
slots of the variable's shape. Each block has its own copy of any other slot (a count of steps), so `update`
must change all copies alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# The name of the variable itself in its state.
WEIGHT = "weight"


@dataclass(frozen=True, kw_only=True)
class ServedVariable:
    """A trained variable: its name and its state.

    Args:
        name: unique among variables.
        shape: of the whole variable.
        dtype: of the variable and of its gradient.
        slots: shape and dtype of each further tensor of its state, by name.
        divisible: its update is elementwise, so blocks may cut it anywhere.
        rows: workers pull and push single rows of dim 0; the update must treat rows independently.
        lazy: with `rows`, a row with a zero gradient does not change: servers update only pushed rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    slots: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    divisible: bool = False
    rows: bool = False
    lazy: bool = False


class Updater(Protocol):
    """The update part of a captured step; the same on every server and worker.

    variables: in one order everywhere.
    fingerprint: a hash of the update graph's text; workers with another one are refused.
    coupled: whether `scalars` needs the sums of all blocks (a global norm); else `sums` is never called.
    given: names of the numbers that come with a push, the inputs of `scalars`.
    numbers: names of the outputs of `scalars`, the inputs of `update`.
    rates: the learning rates among `numbers`, which staleness may divide.
    """

    @property
    def variables(self) -> tuple[ServedVariable, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def coupled(self) -> bool: ...

    @property
    def given(self) -> tuple[str, ...]: ...

    @property
    def numbers(self) -> tuple[str, ...]: ...

    @property
    def rates(self) -> tuple[str, ...]: ...

    def sums(self, variable: str, gradient: Tensor) -> Tensor:
        """One block's contribution to the sums of its variable: 1-D, float64, of one length per variable."""
        ...

    def scalars(
        self, sums: Mapping[str, Tensor], given: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The numbers for `update`, from the sums of each variable over its blocks (none unless `coupled`)
        and the push's numbers (learning rate, counts)."""
        ...

    def update(
        self,
        variable: str,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        scalars: Mapping[str, float],
    ) -> None:
        """One step of one block, in place: `state` holds `weight` and the slots, cut like `gradient`."""
        ...


def add_up(sums: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of each variable from (variable, sums) of its blocks, added in the given order."""
    totals: dict[str, Tensor] = {}
    for name, x in sums:
        totals[name] = totals[name] + x if name in totals else x.to(torch.float64)
    return totals
