"""Process groups by mesh axes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tutti.errors import LayoutError
from tutti.layout.mesh import Mesh

DEFAULT_TIMEOUT_SECONDS = 600.0


def collective_timeout() -> timedelta:
    """How long a collective waits for its peers: `TUTTI_TIMEOUT` seconds, 600 by default."""
    text = os.environ.get("TUTTI_TIMEOUT", "")
    try:
        seconds = float(text or DEFAULT_TIMEOUT_SECONDS)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise LayoutError(
            f'TUTTI_TIMEOUT="{text}" is not a number of seconds', fix="TUTTI_TIMEOUT=600"
        )
    return timedelta(seconds=seconds)


@dataclass(frozen=True)
class Group:
    """This rank's group along some mesh axes.

    `ranks` stand in the order of their coordinates along the axes, major to minor; `position` is
    this rank's place there. torch.distributed orders the members of a group by rank: where that is
    another order, `order[i]` is the place of `ranks[i]` in it, and None otherwise.
    """

    handle: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    position: int
    order: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)


class Groups:
    """The groups that a program uses, made once, by all ranks, in the same order.

    Args:
        axis_sizes: mesh axis -> number of ranks, outermost first; the last varies fastest.
        used: every tuple of axes over which the program runs a collective, the same on all ranks.
        timeout: how long a collective waits; `collective_timeout()` by default.

    Raises:
        LayoutError: the axes do not multiply to the number of ranks, or `used` has an unknown one.
    """

    def __init__(
        self,
        axis_sizes: Mapping[str, int],
        used: Iterable[tuple[str, ...]],
        *,
        timeout: timedelta | None = None,
    ) -> None:
        self.mesh = Mesh(tuple(axis_sizes.items()))
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        if self.mesh.num_ranks != self._world_size:
            raise LayoutError(
                f'layout "{self.mesh}" needs {self.mesh.num_ranks} ranks',
                why=f"{self._world_size} are running",
                fix=f"tutti run -n {self.mesh.num_ranks}, or another layout",
            )
        self._timeout = timeout or collective_timeout()
        self._handles: dict[frozenset[str], dist.ProcessGroup | None] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        for axes in sorted(set(used)):
            self._groups[axes] = self._group(axes)

    def __getitem__(self, axes: tuple[str, ...]) -> Group:
        return self._groups[axes]

    def __contains__(self, axes: object) -> bool:
        return axes in self._groups

    def _group(self, axes: tuple[str, ...]) -> Group:
        for axis in axes:
            if axis not in self.mesh:
                raise LayoutError(f'layout "{self.mesh}" has no axis "{axis}"')
        all_ranks = self.mesh.groups(axes)
        ranks = next(tuple(ranks) for ranks in all_ranks if self.rank in ranks)
        order = tuple(sorted(ranks).index(rank) for rank in ranks)
        straight = order == tuple(range(len(ranks)))
        return Group(
            self._handle(axes, all_ranks),
            ranks,
            ranks.index(self.rank),
            None if straight else order,
        )

    def _handle(
        self, axes: tuple[str, ...], all_ranks: list[list[int]]
    ) -> dist.ProcessGroup | None:
        """Axes of size 1 and the order of axes change nothing about who is in the group."""
        key = frozenset(axis for axis in axes if self.mesh.size(axis) > 1)
        if key not in self._handles:
            self._handles[key] = self._new_handle(all_ranks)
        return self._handles[key]

    def _new_handle(self, all_ranks: list[list[int]]) -> dist.ProcessGroup | None:
        if len(all_ranks[0]) == 1:
            return None
        if len(all_ranks[0]) == self._world_size:
            return dist.group.WORLD
        mine: dist.ProcessGroup | None = None
        for ranks in all_ranks:
            handle = dist.new_group(sorted(ranks), timeout=self._timeout)
            if self.rank in ranks:
                assert isinstance(handle, dist.ProcessGroup)
                mine = handle
        return mine
