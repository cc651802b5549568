"""Weights that the script has changed between two calls of a worker, whose weights are on servers.

The next pull would overwrite them. A worker keeps a copy of the weights that it has last received, and
compares; of tables that it pulls by rows it keeps only PyTorch's count of writes in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tutti.errors import ServerError
from tutti.launch.roles import Role
from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.update import ServedVariable
from tutti.state.residence import local_of
from tutti.torch_private.autograd_engine import version_of


class Edits:
    """The changes of one worker's rank.

    Args:
        variables: those on servers.
    """

    def __init__(self, variables: Iterable[ServedVariable]) -> None:
        variables = list(variables)
        self._names = [v.name for v in variables if not v.rows]
        self._tables = [v.name for v in variables if v.rows]
        self._received: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    def note(self, state: Mapping[str, Tensor]) -> None:
        """Note the weights as they are now."""
        for name in self._names:
            x, kept = local_of(state[name]).detach(), self._received.get(name)
            if kept is None or kept.shape != x.shape or kept.dtype != x.dtype:
                self._received[name] = x.clone()
            else:
                kept.copy_(x)
        for name in self._tables:
            self._versions[name] = version_of(local_of(state[name]))

    def found(self, state: Mapping[str, Tensor]) -> list[str]:
        """The weights that have changed since the last note."""
        found = [
            name
            for name, kept in self._received.items()
            if not _same(local_of(state[name]).detach(), kept)
        ]
        return found + [
            name for name, at in self._versions.items() if version_of(local_of(state[name])) != at
        ]


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
