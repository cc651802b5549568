"""Runs a user's step eagerly, with the random numbers of its captured form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tutti.capture.batch import called
from tutti.capture.one_process import one_process
from tutti.capture.precision import computing
from tutti.capture.second_trace.random_ops import OurRandomness, rewinding
from tutti.capture.state.compiled import nothing_compiled
from tutti.capture.state.models import wrappers_open


def eagerly(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: Any,
    batch: tuple[Any, ...],
    *,
    seed: int,
    step: int,
    precision: str,
) -> Any:
    """The result of the user's step, run eagerly with the random numbers of step number `step`."""
    args = (model,) if optimizer is None else (model, optimizer)
    with (
        OurRandomness(seed, step) as ours,
        rewinding(ours),
        computing(precision, model),
        nothing_compiled(),
        wrappers_open(),
        one_process(),
    ):
        return called(train_step, args, batch)
