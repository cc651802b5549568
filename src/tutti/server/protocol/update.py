"""What a server knows of an optimizer: variables with their state, and three functions.

A server never receives code. It runs the user's script as the workers do, captures the same step, and takes
from it what follows the gradients:

    gradient of each block --sums--> add up over all blocks --scalars--> one set of numbers for the step
    state, gradient, numbers of a block --update--> state

A variable lies on the servers in *blocks*. One that may be cut anywhere (`divisible`) is seen flat, as the
1-D tensors `[start:stop]`; one whose rows travel alone (`rows`) as `[stop - start, *shape[1:]]`; any other
whole, in its own shape. Slots of the variable's shape are cut with it. Of all others (a count of steps)
each block keeps its own copy, so `update` must do the same to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# The name of the variable itself among its state.
WEIGHT = "weight"


@dataclass(frozen=True, kw_only=True)
class ServedVariable:
    """What is trained: a name, and what is kept for it.

    Args:
        name: no two variables share it.
        shape: of the whole variable.
        dtype: of the variable and of its gradient.
        slots: shape and dtype of each further tensor of its state, by name.
        divisible: its update is the same number by number, so it may be cut anywhere.
        rows: workers pull and push single rows of dim 0; the update must be the same row by row.
        lazy: with `rows`, a row whose gradient is zero does not change: only rows pushed are updated.
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
    given: names of the numbers that come with a push and that `scalars` needs.
    numbers: names of those that `scalars` makes of them and that `update` needs.
    rates: those of `numbers` that are learning rates, which staleness may divide.
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
        """What one block adds to the sums of its variable: 1-D, float64, of one length per variable."""
        ...

    def scalars(
        self, sums: Mapping[str, Tensor], given: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The numbers that `update` needs, from the sums of each variable over its blocks (none unless
        `coupled`) and the numbers that came with the push (learning rate, counts)."""
        ...

    def update(
        self,
        variable: str,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        scalars: Mapping[str, float],
    ) -> None:
        """One step of one block, in place: `state` holds `weight` and the slots, cut as `gradient` is."""
        ...


def add_up(sums: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of each variable from (variable, sums) of its blocks, in the order in which they come."""
    totals: dict[str, Tensor] = {}
    for name, x in sums:
        totals[name] = totals[name] + x if name in totals else x.to(torch.float64)
    return totals
