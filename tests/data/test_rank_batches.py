"""Batches on real ranks: a step of them is the step of one device, and no batch costs a collective."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import IterableDataset, TensorDataset

import tutti
from ranks import Ranks
from tutti.layout import Layout

LAYOUTS = [
    "data=2",
    "data=2 tensor=2",
    "pipe=2 data=2 micro=2",
]
REPLICAS = "replica=2 sync=average(every=1)"


def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def dataset(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*torch.randn(2, size, 6, generator=generator, dtype=torch.float64))


def train(layout: str, size: int, batch_size: int, by_loader: bool) -> tuple[list[float], float]:
    """The losses of two epochs, and the sum of the weights after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.distribute(train_step, model, optimizer, layout)
    loader = tutti.loader(
        dataset(size), batch_size, shuffle=True, layout=layout if by_loader else ""
    )
    losses = [step(*batch) for _ in range(2) for batch in loader]
    with step.whole():
        total = sum(p.detach().sum().item() for p in model.parameters())
    return [float(x) for x in losses], total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_on_ranks_is_the_run_of_one_device(ranks: Ranks, layout: str) -> None:
    expected = train("", 20, 8, True)
    for losses, total in ranks.run(train, layout, 20, 8, True, n=Layout.parse(layout).num_ranks):
        assert losses == pytest.approx(expected[0], abs=1e-12)
        assert total == pytest.approx(expected[1], abs=1e-12)


def test_replicas_train_on_their_rows(ranks: Ranks) -> None:
    expected = ranks.run(train, REPLICAS, 16, 8, False, n=2)
    assert ranks.run(train, REPLICAS, 16, 8, True, n=2) == expected


@pytest.mark.parametrize(
    ("layout", "num_workers"), [*((text, 0) for text in [*LAYOUTS, REPLICAS]), ("data=2", 1)]
)
def test_batches_are_dtensors_of_the_global_batch(
    ranks: Ranks, layout: str, num_workers: int
) -> None:
    n = Layout.parse(layout).num_ranks
    assert ranks.run(kinds, layout, num_workers, n=n) == [[True] * 3] * n


def kinds(layout: str, num_workers: int) -> list[bool]:
    """For the batches of an epoch on one rank: whether each is as one device would have it."""
    plain = tutti.loader(dataset(22), 8, shuffle=True, layout="")
    loader = tutti.loader(dataset(22), 8, shuffle=True, layout=layout, num_workers=num_workers)
    mesh = Layout.parse(layout).mesh
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # the ranks of tests are daemons, which may not start workers
    found = []
    for one, other in zip(plain, loader, strict=True):
        for x, y in zip(one, other, strict=True):
            assert isinstance(y, DTensor) and y.shape == x.shape and y.stride() == x.stride()
            names = y.device_mesh.mesh_dim_names
            assert names is not None and set(names) == set(mesh)
            split = ("replica", "data")
            assert list(y.placements) == [Shard(0) if a in split else Replicate() for a in names]
            assert list(y.device_mesh.get_coordinate() or ()) == [
                mesh.coordinates(dist.get_rank())[a] for a in names
            ]
        found.append(all(torch.equal(x, y.full_tensor()) for x, y in zip(one, other, strict=True)))
    return found


def test_a_batch_that_does_not_divide_is_plain_on_every_rank(ranks: Ranks) -> None:
    for last in ranks.run(last_batch, "data=2 tensor=2", n=4):
        assert last == [[18], [19], [20]]


def last_batch(layout: str) -> Any:
    batches = list(tutti.loader([torch.tensor([i]) for i in range(21)], 6, layout=layout))
    assert type(batches[-1]) is Tensor and isinstance(batches[0], DTensor)
    return batches[-1].tolist()


def test_no_batch_costs_a_collective(ranks: Ranks) -> None:
    for first, later in ranks.run(count_collectives, "data=2 tensor=2", n=4):
        assert first > 0 and later == 0


class Collectives(TorchDispatchMode):
    """Counts the collectives of torch.distributed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def count_collectives(layout: str) -> tuple[int, int]:
    """Those at the begin of a loop, with its first batch, and those of the other batches."""
    with Collectives() as called:
        loader = iter(tutti.loader(dataset(80), 8, shuffle=True, layout=layout))
        next(loader)
        first = called.count
        assert len(list(loader)) == 9
    return first, called.count - first


def test_a_run_resumes_on_another_number_of_ranks(ranks: Ranks) -> None:
    loader = tutti.loader(dataset(30), 4, shuffle=True, layout="")
    expected = [[x.tolist() for x in b] for _ in range(2) for b in loader]
    text = json.dumps(tutti.loader(dataset(30), 4, shuffle=True, layout="").state_dict())
    found: list[Any] = []
    for layout, count in [("data=2", 3), ("data=2 tensor=2", 4), ("pipe=2 data=2 micro=2", 6)]:
        answers = ranks.run(read_on, layout, text, count, n=Layout.parse(layout).num_ranks)
        assert all(a == answers[0] for a in answers)
        more, text = answers[0]
        found += more
    assert found == expected[: len(found)]


def read_on(layout: str, text: str, count: int) -> tuple[list[Any], str]:
    """The next batches on one rank, gathered, and the state after them."""
    loader = tutti.loader(dataset(30), 4, shuffle=True, layout=layout)
    loader.load_state_dict(json.loads(text))
    found: list[Any] = []
    while len(found) < count:
        for batch in islice(loader, count - len(found)):
            found.append(
                [(x.full_tensor() if isinstance(x, DTensor) else x).tolist() for x in batch]
            )
    return found, json.dumps(loader.state_dict())


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(22.0).reshape(11, 2)


def test_a_stream_on_ranks_is_the_stream_of_one_device(ranks: Ranks) -> None:
    expected = [b.tolist() for b in tutti.loader(Stream(), 4, layout="")]
    assert ranks.run(stream, "data=2 tensor=2", n=4) == [expected] * 4


def stream(layout: str) -> list[Any]:
    batches = list(tutti.loader(Stream(), 4, layout=layout))
    assert [type(b) for b in batches] == [DTensor, DTensor, Tensor]
    return [(b.full_tensor() if isinstance(b, DTensor) else b).tolist() for b in batches]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("length", "ranks have datasets (list) of different lengths"),
        ("samples", "ranks have different datasets (list): the first samples differ"),
        ("seed", "the loaders of the ranks differ in seed"),
        ("sample", "the loaders of the ranks are at different samples"),
    ],
)
def test_ranks_that_differ(ranks: Ranks, kind: str, what: str) -> None:
    for text in ranks.run(differing, kind, n=2):
        assert text.startswith(what) and "rank 1: " in text and "fix " in text


def differing(kind: str) -> str:
    other = dist.get_rank() == 1
    data = [torch.tensor(i + (other and kind == "samples")) for i in range(8)]
    data = data[:6] if other and kind == "length" else data
    loader = tutti.loader(data, 2, seed=int(other and kind == "seed"), layout="data=2")
    if other and kind == "sample":
        loader.load_state_dict(loader.state_dict() | {"sample": 4})
    try:
        list(loader)
    except tutti.TuttiError as error:
        return str(error)
    return ""


def test_a_layout_for_other_ranks_is_refused(ranks: Ranks) -> None:
    assert all("needs 4 ranks" in text for text in ranks.run(refused, "data=4", n=2))


def refused(layout: str) -> str:
    try:
        list(tutti.loader(dataset(8), 8, layout=layout))
    except tutti.LayoutError as error:
        return str(error)
    return ""


def test_a_layout_of_many_ranks_in_one_process_reads_the_global_batch() -> None:
    """As a command that plays the ranks in this process does."""
    ours = list(tutti.loader(dataset(8), 4, shuffle=True, layout="data=2"))
    theirs = list(tutti.loader(dataset(8), 4, shuffle=True, layout=""))
    assert [type(x) for x in ours[0]] == [Tensor, Tensor]
    assert all(
        torch.equal(x, y)
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a, b, strict=True)
    )


def test_a_step_takes_the_rows_without_a_gather(ranks: Ranks) -> None:
    expected = ranks.run(step_collectives, "data=2", False, n=2)
    assert ranks.run(step_collectives, "data=2", True, n=2) == expected


def step_collectives(layout: str, by_loader: bool) -> int:
    """Those of the second step, whose batch is whole or this rank's rows."""
    model = nn.Linear(6, 6).double()
    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), 0.1), layout)
    batches = tutti.loader(dataset(24), 8, layout=layout if by_loader else "")
    with Collectives() as called:
        counts = []
        for batch in batches:
            before = called.count
            step(*batch)
            counts.append(called.count - before)
    return counts[-1]
