"""The channels between the places of a pipeline, one for each direction between two ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from tutti.comm.channel import DEFAULT_CAPACITY, NUM_SLOTS, Channel
from tutti.comm.channels import make_channels
from tutti.comm.groups import Groups
from tutti.graph import collectives
from tutti.layout import Mesh
from tutti.pipeline.timed import Timed

Edge = tuple[int, int]


class Places:
    """What a program sends between places outside of its loops.

    Args:
        coordinates: of this rank; the rank at another place has all but `pipe` in common.
        channels: by (sending rank, receiving rank).
    """

    def __init__(
        self, mesh: Mesh, coordinates: Mapping[str, int], channels: Mapping[Edge, Channel]
    ) -> None:
        self._channels = channels
        self._ranks = [mesh.rank({**coordinates, "pipe": p}) for p in range(mesh.size("pipe"))]

    def send(self, xs: Sequence[Tensor], source: int, to: int) -> None:
        """Send each of `xs`, from this place `source` to place `to`."""
        channel = self._channels[self._ranks[source], self._ranks[to]]
        for x in xs:
            channel.send(x)

    def receive(
        self, source: int, to: int, likes: Sequence[tuple[Sequence[int], torch.dtype]]
    ) -> list[Tensor]:
        """What place `source` has sent here, of these shapes and dtypes."""
        channel = self._channels[self._ranks[source], self._ranks[to]]
        return [channel.recv(shape, dtype) for shape, dtype in likes]


def edges_of(made: Timed, mesh: Mesh, groups: Groups, device: torch.device) -> dict[Edge, Channel]:
    """The channels that begin or end at this rank; all ranks call this together.

    A channel holds as many messages of one micro-batch as it has slots, so that a rank that runs ahead need
    not wait at once.
    """
    largest = max((x.nbytes for body in made.bodies for x in body.vals.values()), default=0)
    capacity = max(DEFAULT_CAPACITY, largest * NUM_SLOTS)
    edges = [
        (mesh.rank({**rest, "pipe": a}), mesh.rank({**rest, "pipe": b}))
        for a, b in sorted(_pairs(made))
        for rest in _others(mesh)
    ]
    return make_channels(edges, groups, device=device, capacity=capacity)


def _pairs(made: Timed) -> set[tuple[int, int]]:
    """The places that send to each other."""
    at = made.schedule.rank_of
    found = {(at(a), at(b)) for body in made.bodies for a, _, b in body.messages}
    for program in made.programs:
        for node in program.graph.nodes:
            if node.target is collectives.send:
                _, source, to = node.args
                found.add((source, to))
    return {(a, b) for a, b in found if a != b}


def _others(mesh: Mesh) -> list[dict[str, int]]:
    """All coordinates along the axes but `pipe`."""
    axes = [(a, range(n)) for a, n in mesh.axes if a != "pipe"]
    return [dict(zip([a for a, _ in axes], c, strict=True)) for c in product(*(r for _, r in axes))]
