"""A batch that arrives in shards: each rank's rows enter its program without a gather."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import runs
from captured_once import captured_once
from ranks import Ranks
from tutti.calls.sharded_batch import part_over, shardings_of
from tutti.errors import CommError
from tutti.layout import Layout, Mesh, Sharding

NUM_STEPS = 4
# The layout, the dims of the device mesh by axis (any name), the axes that split rows, and the ranks.
CASES = (
    ("sgd", "data=2 zero=3", (("data", "dp"),), 2),
    ("sgd", "data=2 micro=2", (("data", "data"),), 2),
    ("sgd", "tensor=2 data=2", (("data", "data"), ("tensor", "tp")), 4),
    ("gpt", "data=2 seq=2", (("data", "data"), ("seq", "seq")), 4),
    ("sgd", "pipe=2 data=2 micro=2", (("pipe", "pp"), ("data", "dp")), 4),
    ("sgd", "replica=2 sync=average(every=2)", (("replica", "replica"),), 2),
    ("sgd", "replica=2 data=2 sync=average(every=2)", (("replica", "r"), ("data", "d")), 4),
    ("resnet", "data=2", (("data", "data"),), 2),
)
SPLIT = ("replica", "data")
IN_ITS_OWN_DTYPES = ("resnet",)


def device_mesh(layout: str, dims: tuple[tuple[str, str], ...]) -> DeviceMesh:
    """A mesh of all ranks whose dims follow axes of the layout, in the order of `dims`."""
    mesh = Layout.parse(layout).mesh
    order = [list(mesh).index(axis) for axis, _ in dims]
    ranks = torch.arange(mesh.num_ranks).reshape([n for _, n in mesh.axes]).permute(order)
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(name for _, name in dims))


def in_shards(x: Tensor, mesh: DeviceMesh, dims: tuple[tuple[str, str], ...]) -> DTensor:
    """This rank's rows of a global tensor; it makes no use of the others."""
    placements: list[Placement] = [Shard(0) if axis in SPLIT else Replicate() for axis, _ in dims]
    at = mesh.get_coordinate()
    assert at is not None
    for size, k, placement in zip(mesh.shape, at, placements, strict=True):
        if isinstance(placement, Shard):
            x = x.chunk(size)[k]
    return DTensor.from_local(x.clone(), mesh, placements, run_check=False)


def both_ways(
    name: str, layout: str, dims: tuple[tuple[str, str], ...]
) -> tuple[list[float], list[float], list[str], list[str], int]:
    """Losses and collectives with whole batches and with shards; gathers of a batch after the first call."""
    losses, kinds, gathers, wide = [], [], 0, name not in IN_ITS_OWN_DTYPES
    gather = DTensor.full_tensor

    def counted(x: Any, **options: Any) -> Tensor:
        nonlocal gathers
        gathers += 1
        return gather(x, **options)

    for sharded in (False, True):
        play = runs.prepare(name, layout, wide=wide)
        if sharded:
            mesh = device_mesh(layout, dims)
            play.batches = [
                tuple(in_shards(x, mesh, dims) for x in batch) for batch in play.batches
            ]
        found = play.losses(1, (name, wide))
        with mock.patch.object(DTensor, "full_tensor", counted):
            found += play.losses(NUM_STEPS, (name, wide))
        losses.append(found)
        kinds.append([f"{r.kind} {r.axes} {r.nbytes}" for r in play.step.collectives])
    return (*losses, *kinds, gathers)


@pytest.mark.parametrize(
    ("name", "layout", "dims", "n"), CASES, ids=[c[0] + " " + c[1] for c in CASES]
)
def test_the_same_step_without_a_gather(
    ranks: Ranks, name: str, layout: str, dims: tuple[tuple[str, str], ...], n: int
) -> None:
    one = ranks.after(runs.on_one_device, name, 2, name not in IN_ITS_OWN_DTYPES)
    for plain, sharded, before, after, gathers in one.run(both_ways, name, layout, dims, n=n):
        assert sharded == plain
        assert after == before
        assert gathers == 0


def with_other_shards(kind: str) -> tuple[list[float], list[float]]:
    """The losses with whole batches, and with shards that no axis of the layout has."""
    name = "gpt" if kind == "columns" else "sgd"
    plain, play = runs.prepare(name, "data=2"), runs.prepare(name, "data=2")
    if kind == "uneven rows":
        plain.batches = play.batches = [tuple(x[:5] for x in batch) for batch in play.batches]
    mesh = DeviceMesh("cpu", torch.arange(2))
    rank = dist.get_rank()

    def shard(x: Tensor) -> DTensor:
        if kind == "whole":
            return DTensor.from_local(x.clone(), mesh, [Replicate()])
        dim = int(kind == "columns")
        part = x.chunk(2, dim)[rank].contiguous()
        sizes: Any = {"shape": x.shape, "stride": x.stride()}
        return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, **sizes)

    before = plain.losses(NUM_STEPS, (name, True))
    play.batches = [tuple(map(shard, batch)) for batch in play.batches]
    return before, play.losses(NUM_STEPS, (name, True))


@pytest.mark.filterwarnings("ignore:the 5 samples")
@pytest.mark.parametrize("kind", ["columns", "whole", "uneven rows"])
def test_other_shards_are_resharded(ranks: Ranks, kind: str) -> None:
    one = ranks.after(runs.on_one_device, "gpt" if kind == "columns" else "sgd", 2)
    for plain, sharded in one.run(with_other_shards, kind, n=2):
        assert sharded == plain


def with_other_rows(layout: str) -> str:
    """The error of a step in which ranks that must have the same rows have others."""
    play = runs.prepare("sgd", layout)
    dims = (("data", "data"), ("tensor", "tensor"))
    mesh = device_mesh(layout, dims)
    batch = [tuple(in_shards(x, mesh, dims) for x in batch) for batch in play.batches]
    with captured_once(("sgd", True)):
        play.step(*batch[0])
    play.step(*batch[1])
    if dist.get_rank() == 3:
        batch[0][0].to_local()[0, 0] += 1
    try:
        play.step(*batch[0])
    except CommError as error:
        return str(error)
    return ""


def test_ranks_of_one_shard_must_have_the_same_rows() -> None:
    own = Ranks(timeout_seconds=8.0)
    try:
        said = own.after(runs.on_one_device, "sgd", 2).run(with_other_rows, "data=2 tensor=2", n=4)
    finally:
        own.close()
    assert any("different batches" in text and "batch tensor 0" in text for text in said)


def lasting_programs() -> int:
    """The number of programs after whole batches and shards, in turn."""
    play = runs.prepare("sgd", "data=2")
    mesh = device_mesh("data=2", (("data", "data"),))
    whole = play.batches[0]
    with captured_once(("sgd", True)):
        for _ in range(3):
            play.step(*whole)
            play.step(*(in_shards(x, mesh, (("data", "data"),)) for x in whole))
    return len(play.step._programs.known.by_key)


def test_each_form_of_a_batch_has_one_program(ranks: Ranks) -> None:
    one = ranks.after(runs.on_one_device, "sgd", 2)
    assert one.run(lasting_programs, n=2) == [2, 2]


def test_the_part_over_an_axis() -> None:
    mesh = Mesh.parse("replica=2 data=2")
    whole = Sharding.parse("16@replica+data, 4")
    assert str(part_over("replica", whole, mesh)) == "8@data, 4"
    assert part_over("data", whole, mesh) is None
    assert part_over("replica", Sharding.parse("16@data+replica, 4"), mesh) is None
    assert part_over("replica", Sharding.parse("16, 4@replica"), mesh) is None


def test_plain_tensors_have_no_shards() -> None:
    assert shardings_of([torch.zeros(4), 3, None], Mesh.parse("data=2")) == {}
