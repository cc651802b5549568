"""tutti: the plain step, distributed."""

from __future__ import annotations

import functools
from typing import Any

import tutti
from benchmarks.contenders import eager
from benchmarks.contenders.contender import Batches, Contender, Place
from benchmarks.models import Case, optimizer, plain_step
from tutti.launch.ranks import ensure_process_group


class Distributed:
    """A `tutti.Step` and its batches."""

    def __init__(self, step: tutti.Step, batches: Batches) -> None:
        self.distributed, self.batches = step, batches

    def step(self) -> float:
        """See `Contender`; every rank is given the global batch and has the global loss."""
        return self.distributed(*self.batches.next()).item()


def prepare(place: Place) -> None:
    """Join the run, as `tutti run` would have it."""
    eager.prepare(place)
    ensure_process_group()


def place_of(case: Case) -> dict[str, str]:
    """The compute shardings of the weights that tensor parallelism splits, both ends by the vocabulary."""
    ends = [name for name in (case.embedding, case.head) if name]
    place = dict.fromkeys((f"{name}.weight" for name in (*case.columns, *ends)), "tensor, -")
    return place | dict.fromkeys((f"{name}.weight" for name in case.rows), "-, tensor")


def build(case: Case, _place: Place, *, layout: str, num_shares: int) -> Contender:
    """The step under `layout`."""
    model = case.model()
    step = tutti.distribute(plain_step(case), model, optimizer(model), layout, place=place_of(case))
    return Distributed(step, Batches(case, num_shares))


def builder(layout: str, num_shares: int) -> Any:
    """`build` for one layout."""
    return functools.partial(build, layout=layout, num_shares=num_shares)
