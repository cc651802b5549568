"""The parts of a run: steps, and whatever else has a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tutti.capture.state.lift import optimizers_of
from tutti.distributed_step import Step
from tutti.errors import TuttiError


class RunParts:
    """The parts by name: `steps`, the first of which counts the run's steps, and `others`.

    Raises:
        TuttiError: no step, a part without a state, or one that a step saves already; names it.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.steps = {n: x for n, x in parts.items() if isinstance(x, Step)}
        self.others = {n: x for n, x in parts.items() if not isinstance(x, Step)}
        if not self.steps:
            raise TuttiError(
                "Checkpoints needs the step of the run",
                why="its calls are counted, and its model and optimizer are saved",
                fix='tutti.Checkpoints("runs/gpt", every=100, step=step)',
            )
        self._refuse_doubles()
        for name, part in self.others.items():
            if not isinstance(part, dict | torch.Generator) and not _has_state(part):
                raise TuttiError(
                    f'the part "{name}" has no state that can be saved',
                    why=f"{type(part).__name__} lacks state_dict or load_state_dict",
                    fix="a dict of its values, or an object with these two methods",
                )

    def _refuse_doubles(self) -> None:
        seen: dict[int, str] = {}
        for name, step in self.steps.items():
            other = seen.setdefault(id(step.model), name)
            if other != name:
                raise _double(name, f'it has the model of "{other}"')
            seen.update({id(one): name for one in optimizers_of(step.optimizer)})
        for name, part in self.others.items():
            if id(part) in seen:
                raise _double(name, f'"{seen[id(part)]}" saves it already')

    @property
    def main(self) -> Step:
        """The first step."""
        return next(iter(self.steps.values()))

    @property
    def num_steps(self) -> int:
        """The number of steps that the run has taken."""
        return self.main.num_steps

    def state_of(self, name: str) -> Any:
        """The current state of one of `others`."""
        part = self.others[name]
        if isinstance(part, dict):
            return part
        return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()

    def load(self, name: str, state: Any) -> None:
        """Give one of `others` its state back."""
        part = self.others[name]
        if isinstance(part, dict):
            part.clear()
            part.update(state)
        elif isinstance(part, torch.Generator):
            part.set_state(state)
        else:
            part.load_state_dict(state)


def _has_state(part: Any) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def _double(name: str, why: str) -> TuttiError:
    return TuttiError(f'the part "{name}" would be saved twice', why=why, fix=f'leave "{name}" out')
