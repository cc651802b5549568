"""Random numbers that a step draws by Python's `random` and NumPy: as in an eager run, call by call."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from random import random as coin
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import tutti
from ranks import Ranks
from small_steps import trained
from tutti.calls.left_to_workers import refuse_where_served
from tutti.capture.python.generators import global_generators, put_state, state_of
from tutti.capture.step import capture
from tutti.errors import CaptureError, CommError

pytestmark = pytest.mark.usefixtures("in_float64")

CALLS = 8
Loss = Callable[..., Any]


class Net(nn.Module):
    """Three layers, and generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.numpy, self.python = np.random.default_rng(3), random.Random(4)
        self.normal = np.random.RandomState(5).normal

    def forward(self, x: Tensor, layers: Sequence[int] = (0, 1, 2)) -> Tensor:
        for k in layers:
            x = x + torch.tanh(self.layers[k](x))
        return x


def mixup(net: Net, x: Tensor, y: Tensor) -> Any:
    share = np.random.beta(0.4, 0.4)
    mixed = share * x + (1 - share) * x.flip(0)
    return share * F.mse_loss(net(mixed), y) + (1 - share) * F.mse_loss(net(mixed), y.flip(0))


def larger_share(net: Net, x: Tensor, y: Tensor) -> Any:
    share = random.betavariate(0.75, 0.75)
    return F.mse_loss(net(max(share, 1 - share) * x), y)


def flips(net: Net, x: Tensor, y: Tensor) -> Any:
    """Another number of draws for each side of the coin."""
    if coin() < 0.5:
        x = x * random.uniform(0.5, 1.5) + random.gauss(0.0, 0.1)
    return F.mse_loss(net(x), y)


def dropped_layers(net: Net, x: Tensor, y: Tensor) -> Any:
    return F.mse_loss(net(x, [k for k in range(3) if random.random() < 0.7]), y)


def chosen(net: Net, x: Tensor, y: Tensor) -> Any:
    first, count = random.choice([0, 1, 2]), np.random.randint(1, 3)
    scale = np.random.choice([0.5, 1.0, 2.0], p=[0.2, 0.3, 0.5])
    return F.mse_loss(net(scale * x, range(first, min(3, first + count))), y)


def held(net: Net, x: Tensor, y: Tensor) -> Any:
    scale = net.numpy.uniform(0.8, 1.2) * net.python.triangular(0.0, 1.0)
    return F.mse_loss(net(scale * x + net.normal(0.0, 0.1)), y)


def one_of_an_array(net: Net, x: Tensor, y: Tensor) -> Any:
    if np.random.rand(1) < 0.5:
        x = x + np.random.normal(scale=0.1)
    return F.mse_loss(net(x), y)


def by_size(net: Net, x: Tensor, y: Tensor) -> Any:
    """Python reads the whole number: one program for each."""
    width = int(4 * np.random.uniform(0.3, 1.0))
    return F.mse_loss(net(x)[:, :width], y[:, :width])


def after_a_read(net: Net, x: Tensor, y: Tensor) -> Any:
    """The number of draws depends on the value of a tensor."""
    loss = F.mse_loss(net(x), y) * random.random()
    return loss * random.uniform(1.0, 2.0) if loss > 1.0 else loss


LOSSES = {
    one.__name__: one
    for one in (
        *(mixup, larger_share, flips, dropped_layers, chosen, held, one_of_an_array, by_size),
        after_a_read,
    )
}


def losses(
    name: str, layout: str | None, sizes: Sequence[int] = (8,) * CALLS
) -> tuple[list[float], int]:
    """Of some calls, drawing in the script, too, and a sum of the weights; and the number of traces."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    random.seed(1)
    np.random.seed(2)
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    step: Any = trained(LOSSES[name])
    made = (
        (lambda *batch: step(net, optimizer, *batch))
        if layout is None
        else tutti.distribute(step, net, optimizer, layout)
    )
    found, generator = list[float](), torch.Generator().manual_seed(0)
    for n in sizes:
        x, y = (torch.randn(n, 4, generator=generator) for _ in range(2))
        found += [float(made(x, y)), random.random(), float(np.random.rand())]
    found += [net.numpy.uniform(), net.python.random(), net.normal()]
    with tutti.whole(net) if layout is not None else torch.no_grad():
        found.append(float(sum(p.detach().abs().sum() for p in net.parameters())))
    return found, made._num_traces if layout is not None else 0


@pytest.mark.parametrize("name", LOSSES)
def test_as_eager(name: str) -> None:
    assert losses(name, "")[0] == pytest.approx(losses(name, None)[0], abs=1e-12)


@pytest.mark.parametrize("layout", ["data=2 zero=3", "data=2 micro=2", "tensor=2"])
def test_on_ranks(ranks: Ranks, layout: str) -> None:
    for name in ("mixup", "flips", "chosen", "held"):
        expected = losses(name, None)[0]
        for found, _ in ranks.run(losses, name, layout, n=2):
            assert found == pytest.approx(expected, abs=1e-12)


def test_one_program_for_all_numbers() -> None:
    assert losses("mixup", "")[1] == 1
    assert losses("held", "")[1] == 1
    assert losses("larger_share", "")[1] == 2


def test_other_sizes() -> None:
    sizes = (8, 6, 8, 4, 2, 10, 6)
    assert losses("flips", "", sizes)[0] == pytest.approx(
        losses("flips", None, sizes)[0], abs=1e-12
    )


def differently_seeded(name: str, seeds: list[int]) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()
    random.seed(seeds[rank])
    net = Net()
    step = tutti.distribute(trained(LOSSES[name]), net, SGD(net.parameters(), lr=0.1), "data=2")
    try:
        for _ in range(3):
            step(torch.ones(4, 4), torch.ones(4, 4))
    except CommError as error:
        return f"{error.what}; {error.fix}"
    return "no error"


@pytest.mark.parametrize(
    ("name", "seeds", "said"),
    [
        ("flips", [1, 3], "draw 0 is 0.134364244 on rank 0, 0.237964627 on rank 1"),
        ("flips", [1, 2], "3 numbers on rank 0, 1 numbers on rank 1"),
        ("chosen", [0, 1], "draw 0 is 1.0 on rank 0, 0.0 on rank 1"),
    ],
    ids=["numbers", "counts", "choices"],
)
def test_ranks_that_draw_other_numbers_are_refused(name: str, seeds: list[int], said: str) -> None:
    pool = Ranks()
    try:
        found = pool.run(differently_seeded, name, seeds, n=2)
    finally:
        pool.close()
    what = f"the ranks have drawn different random numbers at step 0: {said}"
    assert any(what in one for one in found), found
    assert any("random.seed" in one for one in found)


def test_servers_are_refused() -> None:
    net = Net()
    batch = torch.ones(4, 4), torch.ones(4, 4)
    captured = capture(trained(LOSSES["mixup"]), net, SGD(net.parameters(), lr=0.1), batch)
    with pytest.raises(CaptureError, match=r"draws random numbers from numpy\.random, and servers"):
        refuse_where_served(captured)


def test_verify() -> None:
    """It compares the draws of an eager step, and leaves the generators as they were."""
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    batch = torch.randn(4, 4), torch.randn(4, 4)
    before = [state_of(one) for one in global_generators().values()]
    verdict = tutti.verify(trained(LOSSES["mixup"]), net, optimizer, batch, "data=2 zero=1")
    assert verdict.ok and verdict.capture_error < 1e-12
    assert [state_of(one) for one in global_generators().values()] == before


def test_a_capture_leaves_the_generators() -> None:
    net = Net()
    batch = torch.ones(4, 4), torch.ones(4, 4)
    generators = [*global_generators().values(), net.numpy, net.python]
    before = [state_of(one) for one in generators]
    captured = capture(trained(LOSSES["held"]), net, SGD(net.parameters(), lr=0.1), batch)
    assert [state_of(one) for one in generators] == before
    assert [one.draw.source for one in captured.drawn.numbers] == ["numpy", "python", "normal"]
    for one, state in zip(generators, before, strict=True):
        put_state(one, state)
        assert state_of(one) == state
