"""Each collective between real ranks equals the direct computation on all ranks' inputs, every way."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import Ranks
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.hierarchical import Hierarchical
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.comm.collectives.transport import Distributed
from tutti.comm.host.shared_memory import SharedGroup
from tutti.graph.players.dim_segments import join, split
from tutti.layout.mesh import Mesh
from ways import GLOO, SHARED, TWO_LEVELS, WAYS, by

GRID = {"data": 2, "tensor": 2}
LINE = {"data": 4}
TUPLES = (("data",), ("tensor",), ("data", "tensor"), ("tensor", "data"))
# mesh, axes of the collective
GROUPINGS = [(LINE, ("data",)), *((GRID, axes) for axes in TUPLES)]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64)
OPS = ("sum", "max", "min", "prod")
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
EVERY_GROUPING = pytest.mark.parametrize(("sizes", "axes"), GROUPINGS, ids=str)

Case = tuple[str, tuple[Any, ...], Tensor]  # collective, arguments behind `axes`, all ranks' inputs

_players: dict[tuple[Any, ...], ProcessGroups] = {}


def player_by(way: str, sizes: dict[str, int]) -> ProcessGroups:
    """On one rank: the player of this way, kept."""
    key = (way, *sizes.items())
    if key not in _players:
        used = [axes for axes in TUPLES if all(axis in sizes for axis in axes)]
        with by(way):
            _players[key] = ProcessGroups(Groups(sizes, used))
    return _players[key]


def play(way: str, sizes: dict[str, int], axes: tuple[str, ...], cases: list[Case]) -> list[Tensor]:
    """On one rank: each case's result on this rank's row of the inputs; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        player = player_by(way, sizes)
        return [result_of(player, axes, case) for case in cases]


def result_of(player: ProcessGroups, axes: tuple[str, ...], case: Case) -> Tensor:
    name, args, inputs = case
    x = inputs[player.groups.rank]
    before = x.clone()
    result = getattr(player, name)(x, axes, *args)
    assert torch.equal(x, before), f"{name} changed its input"
    assert result.is_contiguous() and result.dtype == x.dtype
    assert player.current is None
    if x.numel():
        storages = {y.untyped_storage().data_ptr() for y in (x, result)}
        assert len(storages) == 2, f"{name} returned its input"
    return result


def expected(sizes: dict[str, int], axes: tuple[str, ...], case: Case) -> list[Tensor]:
    """The same computed directly, for every rank."""
    name, args, inputs = case
    results: dict[int, Tensor] = {}
    for ranks in Mesh(tuple(sizes.items())).groups(axes):
        for index, rank in enumerate(ranks):
            results[rank] = direct(name, [inputs[r] for r in ranks], index, args)
    return [results[rank] for rank in sorted(results)]


def direct(name: str, xs: list[Tensor], index: int, args: tuple[Any, ...]) -> Tensor:
    n = len(xs)
    if name == "all_reduce":
        return reduce(xs, args[0])
    if name == "all_gather":
        return gathered(xs, *args)
    if name == "reduce_scatter":
        *where, op = args
        return part(reduce(xs, op), index, n, *where)
    if name == "shard":
        return part(xs[index], index, n, *args)
    split_dim, split_outer, cat_dim, cat_outer = args
    return gathered([part(x, index, n, split_dim, split_outer) for x in xs], cat_dim, cat_outer)


def reduce(xs: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(xs)
    if stacked.dtype == torch.bool:
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "prod":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def part(x: Tensor, index: int, n: int, dim: int, outer: int) -> Tensor:
    segments = x.chunk(outer, dim)  # each of them is split
    return torch.cat([segment.chunk(n, dim)[index] for segment in segments], dim)


def gathered(xs: list[Tensor], dim: int, outer: int) -> Tensor:
    pieces = zip(*(x.chunk(outer, dim) for x in xs), strict=True)
    return torch.cat([piece for of_segment in pieces for piece in of_segment], dim)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else None).to(dtype)
    return torch.randint(0, 5, shape, dtype=dtype)


def check(
    ranks: Ranks, way: str, sizes: dict[str, int], axes: tuple[str, ...], cases: list[Case]
) -> None:
    results = ranks.run(play, way, sizes, axes, cases, n=len(cases[0][2]))
    for number, case in enumerate(cases):
        wanted = expected(sizes, axes, case)
        for rank, want in enumerate(wanted):
            got = results[rank][number]
            close = {"rtol": 2e-2, "atol": 2e-2} if got.element_size() == 2 else {}
            note = f"{case[0]}{case[1]} {want.dtype} on rank {rank}"
            torch.testing.assert_close(got, want, **close, msg=lambda m, note=note: f"{note}: {m}")


def moves(inputs: Tensor) -> list[Case]:
    """Every collective that only moves, over each dim of a rank's `[8, 8, 8]`."""
    cases: list[Case] = []
    for dim, outer in itertools.product(range(3), (1, 2)):
        cases.append(("all_gather", (dim, outer), inputs))
        cases.append(("shard", (dim, outer), inputs))
    for dims in itertools.product(range(3), repeat=2):
        for outers in ((1, 1), (2, 1), (1, 2), (2, 2)):
            cases.append(("all_to_all", (dims[0], outers[0], dims[1], outers[1]), inputs))
    return cases


@EVERY_WAY
@EVERY_GROUPING
def test_moves_by_dim(ranks: Ranks, way: str, sizes: dict[str, int], axes: tuple[str, ...]) -> None:
    check(ranks, way, sizes, axes, moves(torch.randn(4, 8, 8, 8)))


@EVERY_WAY
@EVERY_GROUPING
def test_reductions_by_dim(
    ranks: Ranks, way: str, sizes: dict[str, int], axes: tuple[str, ...]
) -> None:
    inputs = torch.randn(4, 8, 8, 8, dtype=torch.float64)
    cases: list[Case] = [("all_reduce", (op,), inputs) for op in OPS]
    for dim, outer, op in itertools.product(range(3), (1, 2), OPS):
        cases.append(("reduce_scatter", (dim, outer, op), inputs))
    check(ranks, way, sizes, axes, cases)


@EVERY_WAY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(ranks: Ranks, way: str, dtype: torch.dtype) -> None:
    inputs = random(dtype, 4, 8, 8)
    ops = ("sum",) if dtype.is_complex else OPS
    cases: list[Case] = [("all_reduce", (op,), inputs) for op in ops]
    cases += [("reduce_scatter", (0, 1, op), inputs) for op in ops]
    cases += [("all_gather", (1, 1), inputs), ("all_to_all", (0, 1, 1, 1), inputs)]
    check(ranks, way, GRID, ("tensor", "data"), cases)


@EVERY_WAY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_larger_tensors(ranks: Ranks, way: str, dtype: torch.dtype) -> None:
    inputs = random(dtype, 4, 300, 256)
    cases: list[Case] = [("all_reduce", (op,), inputs) for op in ("sum", "max")]
    cases += [("reduce_scatter", (0, 1, "sum"), inputs), ("all_gather", (0, 1), inputs)]
    check(ranks, way, GRID, ("tensor", "data"), cases)


@EVERY_WAY
def test_scalars_and_empty_tensors(ranks: Ranks, way: str) -> None:
    scalar, empty = torch.randn(4), torch.randn(4, 4, 0)
    cases: list[Case] = [("all_reduce", (op,), scalar) for op in OPS]
    cases += [("all_reduce", ("sum",), empty), ("all_gather", (0, 1), empty)]
    cases += [("reduce_scatter", (0, 1, "sum"), empty), ("all_to_all", (0, 1, 0, 1), empty)]
    check(ranks, way, LINE, ("data",), cases)


def kinds_on_rank(way: str, sizes: dict[str, int]) -> list[type]:
    player = player_by(way, sizes)
    found = [axes for axes in TUPLES if axes in player.groups]
    return [type(player.groups.transport(axes, torch.device("cpu"))) for axes in found]


def test_each_way_is_the_one_that_was_asked_for(ranks: Ranks) -> None:
    for way, kind in ((GLOO, Distributed), (SHARED, SharedGroup), (TWO_LEVELS, Hierarchical)):
        assert ranks.run(kinds_on_rank, way, LINE) == [[kind]] * 4
    # On a host lie the ranks that differ in their place along `tensor`.
    data, tensor, both, turned = ranks.run(kinds_on_rank, TWO_LEVELS, GRID)[3]
    assert [data, tensor, both, turned] == [Distributed, SharedGroup, Hierarchical, Hierarchical]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "strided": lambda x: x[..., ::2],
    "conjugate": lambda x: x.conj(),
    "real": lambda x: x.real[1:5],
    "negative": lambda x: x.conj().imag,
    "expanded": lambda x: x[:1, :1].expand(4, 4, 8),
    "with grad": lambda x: x.clone().requires_grad_(),
}


def views_on_rank(way: str) -> None:
    """A lazy conjugate does not travel to a rank: views are made there."""
    player = player_by(way, LINE)
    xs = torch.randn(4, 8, 4, 8, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    moves = {
        "all_reduce": ("sum",),
        "all_gather": (1, 1),
        "reduce_scatter": (0, 1, "sum"),
        "all_to_all": (0, 1, 1, 1),
    }
    for (note, view), (name, args) in itertools.product(VIEWS.items(), moves.items()):
        inputs = [view(x) for x in xs]
        got = getattr(player, name)(inputs[player.groups.rank], ("data",), *args)
        want = direct(name, inputs, player.groups.rank, args)
        torch.testing.assert_close(
            got, want.detach(), msg=lambda m, n=f"{name} {note}": f"{n}: {m}"
        )


@EVERY_WAY
def test_inputs_that_are_views(ranks: Ranks, way: str) -> None:
    ranks.run(views_on_rank, way)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_numbers_of_ranks(ranks: Ranks, n: int) -> None:
    cases: list[Case] = []
    for size in (1, 5, 40_000):
        for dtype in (torch.float64, torch.bfloat16):
            inputs = random(dtype, n, n * size)
            cases += [("all_reduce", (op,), inputs) for op in ("sum", "max")]
            cases += [("reduce_scatter", (0, 1, "sum"), inputs), ("all_gather", (0, 1), inputs)]
            cases.append(("all_to_all", (0, 1, 0, 1), inputs))
    check(ranks, SHARED, {"data": n}, ("data",), cases)


def sums_on_rank(way: str, inputs: Tensor) -> list[Tensor]:
    player = player_by(way, LINE)
    return [player.all_reduce(inputs[player.groups.rank], ("data",), "sum") for _ in range(2)]


@EVERY_WAY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [7, 100_001])
def test_a_sum_is_the_same_on_every_rank_and_in_every_run_to_the_bit(
    ranks: Ranks, way: str, size: int, dtype: torch.dtype
) -> None:
    answers = ranks.run(sums_on_rank, way, torch.randn(4, size).to(dtype))
    one, *others = [x for answer in answers for x in answer]
    assert all(torch.equal(one, other) for other in others)


def test_split_and_join_copy_nothing_along_the_first_dim() -> None:
    x = torch.randn(8, 3)
    parts = split(x, 0, 1, 4)
    assert parts.data_ptr() == x.data_ptr()
    assert join(parts, 0, 1).data_ptr() == x.data_ptr()
