"""Collectives between two ranks: tutti's players next to bare Gloo.

A `graph.players.player.Player` is anything that plays a program's collectives; to measure another one, add it
to `PLAYERS`. All stand in the same pair of processes and take turns.

`tutti` takes tensors of the process's own and returns new ones. `in a program` is what a partitioned program
does with gradients and weights: they lie in shared memory from the start, sums are made where they lie.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import gloo
from benchmarks.contenders.contender import Contender, Place, Way
from benchmarks.harness import Crew
from benchmarks.models import CASES, Case
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.execution.allocator import keep_freed_memory
from tutti.graph.players.move import Move

AXES = ("data",)
TURN_SECONDS = 0.05
# (collective, bytes of its larger side), as a program sees it: what is reduced, or what is gathered to.
MOVES = (
    ("all_reduce", 4_000),
    ("all_reduce", 256_000),
    ("all_reduce", 4_000_000),
    ("all_reduce", 100_000_000),
    ("all_gather", 200_000_000),
    ("reduce_scatter", 200_000_000),
)


class Moves(Protocol):
    """The collectives that are measured, as `graph.players.by_dim.ByDim` names them."""

    def lay(self, x: Tensor, name: str) -> Tensor:
        """`x` where the player wants what it is given for collective `name`; not measured."""
        ...

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """See `ByDim`."""
        ...

    def all_gather(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """See `ByDim`."""
        ...

    def reduce_scatter(
        self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int, op: str
    ) -> Tensor:
        """See `ByDim`."""
        ...


# torch 2.13 renamed the collectives on single tensors.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gloo:
    """`torch.distributed` as a program written by hand calls it: all-reduce in place, results ready."""

    def __init__(self) -> None:
        self._ready: dict[tuple[str, int], Tensor] = {}

    def lay(self, x: Tensor, name: str) -> Tensor:
        """Anywhere."""
        return x

    def _result(self, name: str, numel: int) -> Tensor:
        if (name, numel) not in self._ready:
            self._ready[name, numel] = torch.empty(numel)
        return self._ready[name, numel]

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """The sum, in `x` itself."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """The parts one after another."""
        result = self._result("all_gather", dist.get_world_size() * x.numel())
        _gather(result, x)
        return result

    def reduce_scatter(
        self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int, op: str
    ) -> Tensor:
        """This rank's part of the sum."""
        result = self._result("reduce_scatter", x.numel() // dist.get_world_size())
        _scatter(result, x)
        return result


class Tutti(ProcessGroups):
    """tutti's own player on tensors that lie anywhere."""

    def __init__(self) -> None:
        super().__init__(Groups({"data": dist.get_world_size()}, [AXES]))
        keep_freed_memory()  # as in every run of a program

    def lay(self, x: Tensor, name: str) -> Tensor:
        """Anywhere."""
        return x


class InProgram(Tutti):
    """The same on tensors that lie in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self._gathered: dict[int, Tensor] = {}
        shared = self.groups.shared(AXES)
        assert shared is not None
        self._shared, self._lying = shared, self.lodge({}, {})

    def lay(self, x: Tensor, name: str) -> Tensor:
        """In an arena; what is gathered, as this rank's part of the whole."""
        shared = self._shared
        if name != "all_gather":
            return shared.empty(x.shape, x.dtype).copy_(x)
        whole = shared.empty((shared.size, *x.shape), x.dtype)
        part = whole[shared.position].copy_(x)
        self._gathered[part.data_ptr()] = whole
        return part

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """The sum, in `x` itself."""
        return self._lying.play(Move.alike("all_reduce", axes, (), op), [x])[0]

    def all_gather(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """The whole of which `x` is this rank's part, with the parts of the others."""
        whole = self._gathered[x.data_ptr()]
        self._shared.all_gather_([whole])
        return whole.view(-1)

    def reduce_scatter(
        self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int, op: str
    ) -> Tensor:
        """This rank's part of the sum, in `x` itself."""
        (x,) = self._lying.play(Move.alike("reduce_part", axes, (dim, outer), op), [x])
        return self._lying.part(x, axes, dim, outer)


PLAYERS: dict[str, Callable[[], Moves]] = {
    "gloo": Gloo,
    "tutti": Tutti,
    "in a program": InProgram,
}


class Bench:
    """The players of one rank; a `Contender` whose step is one small all-reduce by each."""

    def __init__(self) -> None:
        self.players = {name: make() for name, make in PLAYERS.items()}

    def step(self) -> float:
        """The sum of ones: the number of ranks, whoever plays."""
        sums = [
            p.all_reduce(p.lay(torch.ones(1), "all_reduce"), AXES, "sum")
            for p in self.players.values()
        ]
        return torch.stack([s.view(()) for s in sums]).mean().item()

    def rounds(self, name: str, nbytes: int, num_rounds: int) -> dict[str, list[float]]:
        """Seconds of one collective by each player, a number a round; the same calls on every rank."""
        moves = {who: _move(player, name, nbytes) for who, player in self.players.items()}
        first = [_timed(move, 1) for move in moves.values() for _ in range(2)]
        count = torch.tensor(max(1, min(200, round(TURN_SECONDS / max(first)))))
        dist.all_reduce(count, dist.ReduceOp.MIN)
        seconds: dict[str, list[float]] = {who: [] for who in moves}
        for _ in range(num_rounds):
            for who, move in moves.items():
                dist.barrier()
                seconds[who].append(_timed(move, int(count)))
        return seconds


def _move(player: Moves, name: str, nbytes: int) -> Callable[[], Tensor]:
    """The collective on float32 data of `nbytes`, zeros so that sums stay finite."""
    numel = nbytes // 4
    if name == "all_reduce":
        x = player.lay(torch.zeros(numel), name)
        return lambda: player.all_reduce(x, AXES, "sum")
    if name == "all_gather":
        part = player.lay(torch.zeros(numel // dist.get_world_size()), name)
        return lambda: player.all_gather(part, AXES, 0, 1)
    x = player.lay(torch.zeros(numel), name)
    return lambda: player.reduce_scatter(x, AXES, 0, 1, "sum")


def _timed(move: Callable[[], Tensor], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        move()
    return (time.perf_counter() - began) / count


def build(_case: Case, _place: Place) -> Contender:
    """Every player on this rank."""
    return Bench()


def rounds(bench: Bench, name: str, nbytes: int, num_rounds: int) -> dict[str, list[float]]:
    """`Bench.rounds`, to be called over a crew's pipe."""
    return bench.rounds(name, nbytes, num_rounds)


COLLECTIVES = Way(name="collectives", build=build, prepare=gloo.prepare)


def measure_moves(num_rounds: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Median seconds of every move by every player: the slower rank's, over the rounds."""
    crew = Crew(next(iter(CASES.values())), COLLECTIVES)  # the case is not used
    found: list[dict[str, Any]] = []
    try:
        crew.ready()
        crew.build()
        for name, nbytes in MOVES:
            tell(f"{name} of {nbytes:,} bytes")
            ranks = crew.call(rounds, name, nbytes, num_rounds)
            seconds = {
                who: statistics.median(map(max, zip(*(rank[who] for rank in ranks), strict=True)))
                for who in PLAYERS
            }
            found.append({"name": name, "nbytes": nbytes, "seconds": seconds})
    finally:
        crew.close()
    return found
