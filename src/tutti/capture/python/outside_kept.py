"""Restores Python values outside of an optimizer that trial steps of it change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from tutti.capture.python.findings import Findings
from tutti.capture.python.python_state import PythonState
from tutti.capture.state.first_form import is_of_pytorch
from tutti.capture.state.first_step import inner_optimizers
from tutti.capture.state.optimizer_copies import own_step
from tutti.capture.state.trial_steps import keep_outside_by


@contextlib.contextmanager
def outside_kept(optimizer: Any) -> Iterator[None]:
    """Context that restores the values that the optimizer's `step` reaches, without its own state."""
    inner = inner_optimizers(optimizer)
    if all(is_of_pytorch(one) and own_step(one) is None for one in inner):
        yield
        return
    own = [x for one in inner for x in (vars(one), one.state, *one.state.values())]
    own += [group for one in inner for group in (one.param_groups, *one.param_groups)]
    python = PythonState(optimizer.step, nn.Module(), inner, Findings())
    with python.restored(but={id(x) for x in own}):
        yield


keep_outside_by(outside_kept)
