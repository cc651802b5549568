"""The channels of a run, made by all ranks together."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.collectives.channel import (
    DEFAULT_CAPACITY,
    NUM_SLOTS,
    Channel,
    DistributedChannel,
    SharedChannel,
    ring_nbytes,
)
from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group
from tutti.comm.collectives.groups import Groups
from tutti.comm.host.segment import map_file, new_file, tried

Edge = tuple[int, int]


def make_channels(
    edges: Sequence[Edge],
    groups: Groups,
    *,
    device: torch.device | str = "cpu",
    capacity: int = DEFAULT_CAPACITY,
    num_slots: int = NUM_SLOTS,
) -> dict[Edge, Channel]:
    """The channels that begin or end at this rank, by edge; all ranks call this together.

    CPU tensors go through shared memory between ranks of one host if every rank could map its memory,
    and through torch.distributed otherwise.

    Args:
        edges: (sending rank, receiving rank), the same list on all ranks; duplicates count once.
        groups: tells which ranks share memory.
        device: where tensors are.
        capacity: bytes that each edge holds before `send` waits.
        num_slots: the number of tensors that each edge holds in shared memory.
    """
    edges, device = list(dict.fromkeys(edges)), torch.device(device)
    near = [edge for edge in edges if device.type == "cpu" and groups.same_host(*edge)]
    shared = _shared(near, groups, (capacity, num_slots)) if near else {}
    found: dict[Edge, Channel] = {**(shared or {})}
    for edge in edges:
        if shared is not None and edge in near:
            continue
        handle = dist.new_group(list(edge), timeout=groups.timeout)
        if groups.rank in edge:
            assert isinstance(handle, dist.ProcessGroup)
            made = DistributedChannel(handle, edge, groups.rank, device, capacity=capacity)
            made.meet()
            found[edge] = made
    return found


def _shared(edges: list[Edge], groups: Groups, size: tuple[int, int]) -> dict[Edge, Channel] | None:
    """The channels of this rank; None on all ranks if one of them could not make its own.

    `size` is the capacity of each in bytes, and its number of slots.

    Each sender makes the memory of its edges, and holds it open until the receivers have mapped it.
    """
    nbytes = ring_nbytes(*size)
    fds: dict[str, int] = {}
    found: dict[Edge, Channel] = {}

    def offer() -> None:
        for edge in edges:
            if edge[0] == groups.rank:
                fds[_name(edge)] = new_file(nbytes)

    def take() -> None:
        for edge in edges:
            if groups.rank in edge:
                found[edge] = _taken(edge, offers, groups, size)

    try:
        _, problem = tried(offer, None, nbytes)
        text = json.dumps({"pid": os.getpid(), "fds": fds, "problem": problem})
        offers = [json.loads(text) for text in exchange_texts(text, Group.world())]
        problems = [offer["problem"] for offer in offers]
        if not any(problems):
            _, problem = tried(take, None, nbytes)
            problems = exchange_texts(problem, Group.world())  # all have mapped theirs, or given up
    finally:
        for fd in fds.values():
            os.close(fd)
    groups.tell([f"ranks share no memory: {problem}" for problem in problems if problem])
    return None if any(problems) else found


def _taken(edge: Edge, offers: list[Any], groups: Groups, size: tuple[int, int]) -> SharedChannel:
    capacity, num_slots = size
    source, to = (offers[rank] for rank in edge)
    return SharedChannel(
        map_file(source["pid"], source["fds"][_name(edge)], ring_nbytes(*size), at_once=True),
        edge,
        groups.rank,
        (source["pid"], to["pid"]),
        groups.timeout.total_seconds(),
        capacity=capacity,
        num_slots=num_slots,
        num_neighbors=groups.num_neighbors,
    )


def _name(edge: Edge) -> str:
    return f"{edge[0]} -> {edge[1]}"
