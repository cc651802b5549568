"""Which tensors of a batch are split, and by which dim; whole steps by `verify`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import tutti
from small_steps import trained
from tutti.errors import LayoutError, ShardingError
from tutti.graph.ops import collectives
from tutti.layout import Layout
from tutti.propagate.batch_dim import dims_of

Batch = tuple[Any, ...]


def ppo_loss(model: nn.Module, rollouts: Tensor, returns: Tensor, index: Tensor) -> Tensor:
    """Rollouts (T, N, d) and returns (T, N), of which a minibatch is looked up by its numbers."""
    x, y = rollouts.flatten(0, 1)[index], returns.flatten()[index]
    return F.mse_loss(model(x).squeeze(-1), y)


def first_loss(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Classes have weights: another first dim, which is no dim of samples."""
    return F.cross_entropy(model(x), y, weight=weight)


def steps_first_loss(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Samples in dim 1 of `x` (steps, batch, d), and in dim 0 of their lengths."""
    late = torch.arange(x.shape[0])[:, None] >= lengths
    return model(x).squeeze(-1).masked_fill(late, 0.0).square().sum() / lengths.sum()


def table_loss(model: nn.Module, table: Tensor) -> Tensor:
    """A sum over pairs of rows: nothing that looks like samples."""
    return model(table @ table.T @ table).square().mean()


PPO = ppo_loss, (torch.randn(16, 5, 8), torch.randn(16, 5), torch.randperm(80)[:32])
CLASSES = first_loss, (torch.randn(12, 8), torch.randint(0, 6, (12,)), torch.rand(6))
STEPS_FIRST = steps_first_loss, (torch.randn(9, 4, 8), torch.tensor([9, 3, 5, 7]))


def verified(
    loss: Any, batch: Batch, layout: str, batch_dim: Any = None, out: int = 1
) -> tuple[tutti.Verdict, list[str], float]:
    """The verdict, the warnings, and how much of the heaviest matmul of the forward a rank does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, out))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = trained(loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verdict = tutti.verify(step, model, optimizer, batch, layout, batch_dim=batch_dim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = tutti.distribute(step, model, optimizer, layout, batch_dim=batch_dim).program_of(
            batch
        )
    tanh = [
        [n.meta["val"].numel() for n in graph.nodes if n.target is torch.ops.aten.tanh.default]
        for graph in (program.graph, program.captured.graph)
    ]
    return verdict, [str(w.message) for w in caught], tanh[0][0] / tanh[1][0]


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "data=4 zero=1"])
def test_a_minibatch_by_numbers_is_split_by_them(layout: str) -> None:
    verdict, said, part = verified(*PPO, layout)
    assert verdict.ok, verdict
    assert part == 1 / Layout.parse(layout).num_ranks and not said


def test_tensors_that_hold_no_samples_stay_whole() -> None:
    verdict, said, part = verified(*CLASSES, "data=2", out=6)
    assert verdict.ok and part == 1 / 2 and not said


def test_samples_in_another_dim_are_told() -> None:
    for told in ([1, 0], {0: 1}):
        verdict, said, part = verified(*STEPS_FIRST, "data=2 zero=1", told)
        assert verdict.ok and part == 1 / 2 and not said, (told, said)


def test_where_most_stays_whole_it_is_said() -> None:
    loss, batch = STEPS_FIRST
    verdict, said, part = verified(loss, batch, "data=4")
    assert verdict.ok
    if part == 1:
        (text,) = [w for w in said if "works it out whole" in w]
        assert "batch_dim" in text and "batch tensor" in text and "[9, 4, 8]" in text


def test_none_holds_no_samples() -> None:
    verdict, _, part = verified(*CLASSES, "data=2", [None, None, None], out=6)
    assert verdict.ok and part == 1


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([0], "has 1 entries, the step was called with 3 arguments"),
        ({"z": 0}, "has no argument 'z'"),
        (3, "batch_dim=3 of batch tensor 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(told: Any, said: str) -> None:
    with pytest.raises(ShardingError) as caught:
        verified(*CLASSES, "data=2", told, out=6)
    assert said in str(caught.value) and caught.value.fix


def test_arguments_may_be_named() -> None:
    def step(model: Any, optimizer: Any, images: Any, extra: Any = None) -> None: ...

    images, extra = torch.ones(3, 4), {"mask": torch.ones(4), "scale": torch.ones(()), "name": "a"}
    told = {"images": -1, "extra": {"mask": None}}
    found = dims_of(told, step, (images, extra), first=2)
    assert found == {"batch.0": 1, "batch.1": None, "batch.2": None}
    assert dims_of(0, step, (images, extra), first=2) == {
        "batch.0": 0,
        "batch.1": 0,
        "batch.2": None,
    }


def test_replicas_cut_dim_0() -> None:
    with pytest.raises(LayoutError, match="batch_dim cannot be told"):
        verified(*CLASSES, "replica=2 sync=average(every=2)", 0, out=6)


@pytest.mark.parametrize(
    "layout", ["data=3 zero=3", "data=2 micro=4 zero=1", "pipe=2 micro=4", "micro=4"]
)
def test_an_uneven_batch_is_the_same_step(layout: str) -> None:
    loss, (x, y, weight) = CLASSES
    verdict, said, _ = verified(loss, (x[:7], y[:7], weight), layout, out=6)
    assert verdict.ok, verdict
    assert all("drop_last" in w for w in said) and len(said) == layout.count("data") + layout.count(
        "micro"
    )


def private_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, noise: Any) -> Tensor:
    """DP-SGD: gradients of samples, clipped, added up, and with noise."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, p, (x[None],)), y[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
    share = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, p in model.named_parameters():
        summed = torch.einsum("b,b...->...", share, found[name])
        p.grad = (summed + 0.1 * noise[name]) / len(x)
    optimizer.step()
    return norms.mean()


@pytest.mark.parametrize("layout", ["micro=2", "data=2 micro=2", "data=2 zero=2"])
def test_a_tensor_that_the_update_alone_reads_has_no_samples(layout: str) -> None:
    """Noise with as many rows as the batch has samples."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    noise = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    batch = torch.randn(4, 3), torch.randint(0, 4, (4,)), noise
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    verdict = tutti.verify(private_step, model, optimizer, batch, layout)
    assert verdict.ok and verdict.max_error < 1e-12, verdict
    step = tutti.distribute(private_step, model, optimizer, layout)
    samples = step.program_of(batch).plan.samples
    assert [bool(samples[f"batch.{k}"].axes) for k in range(4)] == [True, True, False, False]


def validated_step(model: nn.Module, optimizer: Any, x: Tensor, seen: Tensor) -> Any:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        return loss, model(seen).square().mean()


def test_a_batch_that_new_weights_are_validated_on_has_samples() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    job = validated_step, model, torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(8, 3), torch.randn(8, 3)
    samples = tutti.distribute(*job, "data=2").program_of(batch).plan.samples
    assert samples["batch.0"].axes == samples["batch.1"].axes == {"data"}
    assert tutti.verify(*job, batch, "data=2").ok


def test_zero_leaves_gradients_of_samples_where_they_are() -> None:
    """Each rank clips those of its own samples; one reduce-scatter adds up what is left of them."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    noise = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    batch = torch.randn(6, 3), torch.randint(0, 4, (6,)), noise
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    layout = "data=2 zero=2"
    verdict = tutti.verify(private_step, model, optimizer, batch, layout)
    assert verdict.ok and verdict.max_error < 1e-12, verdict
    graph = tutti.distribute(private_step, model, optimizer, layout).program_of(batch).graph
    moved = [n for n in graph.nodes if n.target in collectives.COLLECTIVES]
    sent = {n.target: n.args[0].meta["val"].numel() for n in moved}
    assert collectives.all_to_all not in sent
    assert sent[collectives.reduce_scatter] <= 4 * 3


def accumulated(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Gradients accumulated by hand, over two chunks of the batch."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for rows, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(model(rows), targets, reduction="sum") / len(x)
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


@pytest.mark.parametrize(
    "samples, micro, taken", [(8, 4, 4), (8, 2, 2), (6, 2, 1), (6, 3, 3), (7, 7, 1)]
)
def test_micro_batches_take_rows_of_each_chunk(samples: int, micro: int, taken: int) -> None:
    """As many as the chunks have rows for; a pipeline is cut then, too."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(samples, 8), torch.randint(0, 3, (samples,))
    layout = f"pipe=2 micro={micro}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verdict = tutti.verify(accumulated, model, optimizer, batch, layout)
    assert verdict.ok and verdict.max_error < 1e-12, verdict
    said = [str(w.message) for w in caught]
    assert [f"in {taken} slice" in text for text in said] == ([True] if taken < micro else [])
