"""Refuses state whose names are no longer those of one value: inputs of a step are told apart by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tutti.capture.state.lift import Hyper, StateTensor
from tutti.errors import CaptureError
from tutti.user_lines import program_line, quoted


def refuse_shared_names(state: Sequence[StateTensor], hypers: Collection[Hyper]) -> None:
    """Raise unless each slot and each hyper-parameter has a name of its own.

    Raises:
        CaptureError: two optimizers keep slots of one parameter, or a slot has the name of an option.
    """
    options = {hyper.name for hyper in hypers}
    seen: set[str] = set()
    for one in state:
        if one.name in seen:
            raise _of_two_optimizers(one)
        if one.name in options:
            raise _of_an_option(one)
        seen.add(one.name)


def _of_two_optimizers(one: Any) -> CaptureError:
    return CaptureError(
        f"two optimizers of the step keep {one.slot} of the parameter {one.owner}",
        at=quoted(program_line()),
        why="a step keeps one value of each slot, so both optimizers would read and write the same",
        fix="a distributed step for each optimizer (tutti.distribute(first_step, model, first) and "
        "tutti.distribute(second_step, model, second)), called one after the other; or parameters of its own "
        "for each",
    )


def _of_an_option(one: Any) -> CaptureError:
    return CaptureError(
        f"the optimizer keeps {one.slot} of the parameter {one.owner}, and has an option of this name",
        at=quoted(program_line()),
        why=f"the slot of a parameter called {one.owner} and the option {one.slot} of group {one.owner} both "
        f"are {one.name}",
        fix=f'another name for the slot, such as state[p]["{one.slot}_buffer"]; or parameters with names, as '
        "of an nn.ParameterDict in place of an nn.ParameterList",
    )
