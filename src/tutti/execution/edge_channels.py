"""The channels between pipeline ranks, one for each direction between two ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor, fx

from tutti.comm.collectives.channel import DEFAULT_CAPACITY, NUM_SLOTS, Channel
from tutti.comm.collectives.channels import make_channels
from tutti.comm.collectives.failure import Wait, waiting
from tutti.comm.collectives.groups import Groups
from tutti.graph.ops import collectives
from tutti.graph.players.player import Like
from tutti.layout import Mesh
from tutti.pipeline.ranks.edge_sizes import EdgeSize, size_of_edges
from tutti.pipeline.timed import Timed

Edge = tuple[int, int]


class EdgeMessages:
    """The `graph.players.player.Messages` that a program sends between pipeline ranks outside of its loops.

    Args:
        coordinates: of this rank; its counterpart at another pipeline rank differs only in `pipe`.
        channels: by (sending rank, receiving rank).

    `current` is the message in progress, or the one that failed; None between them.
    """

    def __init__(
        self, mesh: Mesh, coordinates: Mapping[str, int], channels: Mapping[Edge, Channel]
    ) -> None:
        self._channels = channels
        self.current: Wait | None = None
        self._ranks = [mesh.rank({**coordinates, "pipe": p}) for p in range(mesh.size("pipe"))]

    def send(self, xs: Sequence[Tensor], source: int, to: int) -> None:
        """Send each of `xs`, from this pipeline rank `source` to pipeline rank `to`."""
        edge = self._ranks[source], self._ranks[to]
        self.current = waiting("send", edge, sum(x.nbytes for x in xs))
        for x in xs:
            self._channels[edge].send(x, more=x is not xs[-1])
        self.current = None

    def receive(self, source: int, to: int, likes: Sequence[Like]) -> list[Tensor]:
        """Receive tensors of these shapes and dtypes from pipeline rank `source`."""
        edge = self._ranks[source], self._ranks[to]
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in likes)
        self.current = waiting("recv", edge, nbytes)
        found = [self._channels[edge].recv(shape, dtype) for shape, dtype in likes]
        self.current = None
        return found


def edges_of(made: Timed, mesh: Mesh, groups: Groups, device: torch.device) -> dict[Edge, Channel]:
    """The channels that begin or end at this rank; all ranks call this together.

    A channel holds so much that a rank ahead of the others does not wait at once, and that no ranks
    wait in a circle.
    """
    least = EdgeSize(DEFAULT_CAPACITY, NUM_SLOTS)
    size = size_of_edges(made.bodies, made.schedule.rank_of, least)
    edges = [
        (mesh.rank({**rest, "pipe": a}), mesh.rank({**rest, "pipe": b}))
        for a, b in sorted(_pairs(made))
        for rest in _others(mesh)
    ]
    return make_channels(
        edges, groups, device=device, capacity=size.capacity, num_slots=size.num_slots
    )


def in_common(made: Timed) -> list[str]:
    """The decisions that must be equal on all ranks, a line each: rows, messages, the sharding of state."""
    found = []
    for pipe_rank, body in enumerate(made.bodies):
        found += [f"pipeline rank {pipe_rank} does {do}" for do in body.row]
        for (stage, kind, other), names in body.messages.items():
            sizes = ", ".join(f"{n} {list(body.vals[n].shape)}" for n in names)
            found.append(f"{stage}{kind} sends stage {other}: {sizes}")
    for pipe_rank, program in enumerate(made.programs):
        nodes = (
            n for n in program.graph.nodes if n.target in (collectives.send, collectives.receive)
        )
        found += [
            f"pipeline rank {pipe_rank}: {n.target.__name__} {n.args[-2:]} at {_line(n)}"
            for n in nodes
        ]
    return found + [f"{name} lives at {sorted(at)}" for name, at in made.owners.items()]


def _line(node: fx.Node) -> str:
    return os.path.basename(node.meta.get("source") or "")


def _pairs(made: Timed) -> set[tuple[int, int]]:
    """The pipeline ranks that send to each other."""
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
