"""Weights that the script has changed between two calls of a worker, whose weights are on servers.

The next pull would overwrite them. A worker keeps a copy of the weights that it has last received, and
compares; of a table that travels by row while the model has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tutti.errors import ServerError
from tutti.launch.roles import Role
from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.update import ServedVariable
from tutti.serving.absent_tables import is_absent
from tutti.state.residence import local_of


class Edits:
    """The changes of one worker's rank.

    Args:
        variables: those on servers.
    """

    def __init__(self, variables: Iterable[ServedVariable]) -> None:
        self._names = [v.name for v in variables]
        self._received: dict[str, Tensor] = {}
        self._begun = False

    def note(self, state: Mapping[str, Tensor], names: Iterable[str] | None = None) -> None:
        """Note the weights (or those given) as they are now; an absent table is forgotten."""
        self._begun = True
        with torch.inference_mode(False):
            for name in self._names if names is None else names:
                if is_absent(state[name]):
                    self._received.pop(name, None)
                    continue
                x, kept = local_of(state[name]).detach(), self._received.get(name)
                if kept is None or kept.shape != x.shape or kept.dtype != x.dtype:
                    self._received[name] = x.clone()
                else:
                    kept.copy_(x)

    def found(self, state: Mapping[str, Tensor]) -> list[str]:
        """The weights that have changed since the last note."""
        here = (name for name in self._names if self._begun and not is_absent(state[name]))
        return [name for name in here if not self._is_noted(name, state[name])]

    def _is_noted(self, name: str, x: Tensor) -> bool:
        kept = self._received.get(name)
        return kept is not None and _same(local_of(x).detach(), kept)


def _same(x: Tensor, kept: Tensor) -> bool:
    if x.shape != kept.shape or x.dtype != kept.dtype:
        return False
    return torch.equal(x, kept) or bool(((x == kept) | (x.isnan() & kept.isnan())).all())


def edited_apart(name: str, consistency: Consistency) -> ServerError:
    """The error for a change between calls if each push is an update of its own."""
    return ServerError(
        f'the script has changed "{name}" between two calls, and servers keep it',
        why=f"with sync={consistency} other workers push gradients of the old values meanwhile",
        fix="change it in the step, or sync=step, or step.load_state_dict(...) on all workers together",
    )


def edited_alone(name: str, role: Role) -> ServerError:
    """The error for a change by one worker."""
    return ServerError(
        f'{role} has changed "{name}" between two calls, and another worker has not',
        why="the servers keep one value for all workers",
        fix="the same change in the script of each worker",
    )
