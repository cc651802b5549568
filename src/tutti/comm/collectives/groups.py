"""Groups by mesh axes, and the transport of each."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group, collective_timeout
from tutti.comm.collectives.hierarchical import Hierarchical
from tutti.comm.collectives.transport import Distributed, Transport
from tutti.comm.host.segment import SharedMemoryError, memory_host
from tutti.comm.host.shared_memory import SharedGroup
from tutti.errors import LayoutError
from tutti.graph.ops.matmul import is_faster
from tutti.layout.mesh import Mesh
from tutti.user_lines import users_level

Axes = tuple[str, ...]


class Groups:
    """The groups of a run; all ranks make them in the same order.

    CPU tensors travel through shared memory if all ranks of a group lie on one host. If several hosts
    have equally many of them, they travel through shared memory inside a host and torch.distributed
    between. Otherwise, and on GPUs, torch.distributed alone carries them.

    Args:
        axis_sizes: mesh axis -> number of ranks, outermost first; the last varies fastest.
        used: tuples of axes over which collectives run, the same on all ranks; `add` takes more.
        timeout: how long a collective waits; `collective_timeout()` by default.

    Raises:
        LayoutError: the axes do not multiply to the number of ranks, or `used` has an unknown one.
    """

    def __init__(
        self,
        axis_sizes: Mapping[str, int],
        used: Iterable[Axes] = (),
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
        self._groups: dict[Axes, Group] = {}
        self._near: dict[Axes, Transport] = {}
        self._far: dict[Axes, Transport] = {}
        self._hosts, self._onednn = [""] * self._world_size, is_faster()
        self._warned = False
        self.failed = (
            ""  # the error that ended a step half-way on this rank; the others are elsewhere since
        )
        if self._world_size > 1:
            # A rank without shared memory counts as a separate host; all ranks must know that.
            said = exchange_texts(json.dumps([memory_host(self.rank), self._onednn]), Group.world())
            self._hosts = [json.loads(text)[0] for text in said]
            self._onednn = all(json.loads(text)[1] for text in said)
        self.add(used)

    def add(self, used: Iterable[Axes]) -> None:
        """Make the missing groups of `used`; all ranks call this together."""
        new = sorted(set(used) - set(self._groups))
        problems: list[str] = []
        for axes in new:
            all_ranks = self._all_ranks(axes)
            ranks = next(tuple(ranks) for ranks in all_ranks if self.rank in ranks)
            group = Group.of(self._handle(axes, all_ranks), ranks, self.rank)
            self._groups[axes] = group
            self._far[axes] = Distributed(group)
            # Axes of size 1 change nothing: one shared memory serves both.
            same = [a for a in self._near if self.mesh.groups(a) == all_ranks]
            near = self._near[same[0]] if same else self._nearest(group, all_ranks, problems)
            self._near[axes] = near
        # If no two ranks can share memory, no rank has tried.
        if new and len(set(self._hosts)) < self._world_size:
            self.tell(exchange_texts("".join(problems[:1]), Group.world()))

    def __getitem__(self, axes: Axes) -> Group:
        return self._groups[axes]

    def __contains__(self, axes: object) -> bool:
        return axes in self._groups

    def transport(self, axes: Axes, device: torch.device) -> Transport:
        """The transport of collectives of tensors on `device` over `axes`."""
        return (self._near if device.type == "cpu" else self._far)[axes]

    def shared(self, axes: Axes) -> SharedGroup | None:
        """The shared memory of the group over `axes`, if it carries the group's collectives."""
        found = self._near[axes]
        return found if isinstance(found, SharedGroup) else None

    def same_host(self, one: int, other: int) -> bool:
        """Whether two ranks of the run can share memory."""
        return self._hosts[one] == self._hosts[other]

    @property
    def num_neighbors(self) -> int:
        """How many ranks of the run lie on this rank's host, itself among them."""
        return self._hosts.count(self._hosts[self.rank])

    @property
    def onednn(self) -> bool:
        """Whether oneDNN's matmuls are faster on the processors of all ranks."""
        return self._onednn

    @property
    def timeout(self) -> timedelta:
        """How long a collective waits."""
        return self._timeout

    def tell(self, problems: Sequence[str]) -> None:
        """Warn once, for all ranks and groups, that ranks share no memory, with the reason.

        Args:
            problems: the same on all ranks; empty texts are none.
        """
        found = next(filter(None, problems), "")
        if found and not self._warned and self.rank == 0:
            warnings.warn(
                f"{found}; what cannot go through it goes through Gloo, which is slower",
                stacklevel=users_level(),
            )
        self._warned |= bool(found)

    def _all_ranks(self, axes: Axes) -> list[list[int]]:
        for axis in axes:
            if axis not in self.mesh:
                raise LayoutError(f'layout "{self.mesh}" has no axis "{axis}"')
        return self.mesh.groups(axes)

    def _handle(self, axes: Axes, all_ranks: list[list[int]]) -> dist.ProcessGroup | None:
        """Neither axes of size 1 nor the order of axes change a group's members."""
        key = frozenset(axis for axis in axes if self.mesh.size(axis) > 1)
        if key not in self._handles:
            self._handles[key] = self._new_handle(all_ranks)
        return self._handles[key]

    def _new_handle(self, all_ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Every rank makes the groups of all ranks, in one order: torch.distributed requires it."""
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

    def _nearest(self, group: Group, all_ranks: list[list[int]], problems: list[str]) -> Transport:
        """The fastest transport between the ranks of a group; groups over the same axes get the same."""
        if group.size == 1:
            return Distributed(group)
        by_host = [self._by_host(ranks) for ranks in all_ranks]
        if all(len(hosts) == 1 for hosts in by_host):
            return self._share(group, problems) or Distributed(group)
        width = len(by_host[0][0])
        even = all(len(ranks) == width for hosts in by_host for ranks in hosts)
        if width == 1 or not even:
            return Distributed(group)
        return self._two_levels(group, by_host, problems)

    def _by_host(self, ranks: Sequence[int]) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        for rank in ranks:
            found.setdefault(self._hosts[rank], []).append(rank)
        return list(found.values())

    def _share(self, group: Group, problems: list[str]) -> SharedGroup | None:
        """The group's shared memory; None on all its ranks, and one more problem, if it fails."""

        def exchange(text: str) -> list[str]:
            return exchange_texts(text, group, "the start of a group")

        try:
            return SharedGroup(
                group.ranks,
                group.position,
                exchange,
                self._timeout.total_seconds(),
                num_neighbors=self.num_neighbors,
            )
        except SharedMemoryError as error:
            problems.append(f"ranks {', '.join(map(str, group.ranks))} share no memory: {error}")
            return None

    def _two_levels(
        self, group: Group, by_host: list[list[list[int]]], problems: list[str]
    ) -> Transport:
        inside = [ranks for hosts in by_host for ranks in hosts]
        across = [list(ranks) for hosts in by_host for ranks in zip(*hosts, strict=True)]
        near, far = (
            Group.of(
                self._new_handle(every), tuple(next(r for r in every if self.rank in r)), self.rank
            )
            for every in (inside, across)
        )
        shared = self._share(near, problems)
        # All must use the same transport, so each rank must know that all others have shared memory.
        if not all(exchange_texts("yes" if shared else "", Group.world())):
            return Distributed(group)
        assert shared is not None
        hosts = next(hosts for hosts in by_host if any(self.rank in ranks for ranks in hosts))
        return Hierarchical(group.ranks, hosts, shared, Distributed(far))
