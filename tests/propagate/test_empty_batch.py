"""A batch without samples is refused, on one device and on ranks; other sizes of 0 are played."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks
from small_steps import trained
from tutti.errors import LayoutError, ShardingError

LAYOUTS = ("", "data=2", "micro=2", "pipe=2", "pipe=2 micro=2", "data=2 micro=2", "data=2 zero=3")
RANKS = ("data=2", "data=2 micro=2", "pipe=2 micro=2", "replica=2 sync=average(every=2)")


def model_of() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


step = trained(_loss)


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(size, 4).double(), torch.zeros(size, dtype=torch.long)


def on_ranks(layout: str, called_before: bool) -> tuple[str, float, float]:
    """What an empty batch raises, the largest change of a weight by it, and the loss of the next batch."""
    model, optimizer = model_of()
    played = tutti.distribute(step, model, optimizer, layout)
    if called_before:
        played(*batch_of(4))
    before = played.model_state()
    said = ""
    try:
        played(*batch_of(0))
    except ShardingError as error:
        said = str(error)
    after = played.model_state()
    moved = max(float((after[k] - before[k]).abs().max()) for k in after)
    return said, moved, float(played(*batch_of(4)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_refuses_an_empty_batch(layout: str) -> None:
    with pytest.raises(ShardingError, match="the batch is empty: batch tensor 0 has 0 samples"):
        tutti.verify(step, *model_of(), batch_of(0), layout)


@pytest.mark.parametrize("layout", ["", "micro=2"])
@pytest.mark.parametrize("called_before", [False, True])
def test_one_device_refuses_it_and_goes_on(layout: str, called_before: bool) -> None:
    said, moved, loss = on_ranks(layout, called_before)
    assert said.startswith("the batch is empty") and "why" in said and "drop_last=True" in said
    assert moved == 0 and 0 < loss < 10


@pytest.mark.parametrize("layout", RANKS)
def test_ranks_refuse_it_and_go_on(ranks: Ranks, layout: str) -> None:
    for said, moved, loss in ranks.run(on_ranks, layout, True, n=2):
        assert said.startswith("the batch is empty"), said
        assert moved == 0 and 0 < loss < 10


def test_an_evaluation_refuses_it() -> None:
    model, _ = model_of()
    with pytest.raises(ShardingError, match="the batch is empty"):
        tutti.distribute(lambda m, x: m(x), model, None, "")(batch_of(0)[0])


def test_the_dim_of_samples_counts() -> None:
    model, _ = model_of()
    first, second = torch.zeros(3, 0, 4).double(), torch.zeros(0, 3, 4).double()

    def evaluation(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    played = tutti.distribute(evaluation, model, None, "", batch_dim=1)
    with pytest.raises(ShardingError, match="has 0 samples in dim 1"):
        played(first)
    assert played(second).shape == (0, 3, 3)
    told_none = tutti.distribute(evaluation, model, None, "", batch_dim=[None])
    assert told_none(second).shape == (0, 3, 3)


def _sizes(model: nn.Module, *_: Any) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


WITHOUT_SAMPLES: list[tuple[Any, ...]] = [
    *[(), (None,), (None, None), ([],), ({},), (1,), (torch.ones(()),)]
]
SPLITS = ("data=2", "micro=2", "data=2 zero=3")


@pytest.mark.parametrize(
    ("batch", "layout"), list(zip(WITHOUT_SAMPLES, cycle(SPLITS), strict=False))
)
def test_a_batch_without_samples_to_split_is_that_of_one_device(
    batch: tuple[Any, ...], layout: str
) -> None:
    plain, played = model_of(), model_of()
    distributed = tutti.distribute(trained(_sizes), *played, "micro=2")
    for _ in range(2):
        expected = trained(_sizes)(*plain, *batch)
        torch.testing.assert_close(distributed(*batch), expected)
    for p, q in zip(plain[0].parameters(), played[0].parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert tutti.verify(trained(_sizes), *model_of(), batch, layout).ok


class Attends(nn.Module):
    """Embedding, attention, norm, linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv = nn.Embedding(8, 4), nn.Linear(4, 12)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.qkv(h).view(*tokens.shape, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(self.norm(h + mixed))


def _squares(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().sum() / tokens.shape[0]


def attending() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Attends().double()
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def lengths_played(layout: str | None) -> list[float]:
    """Losses of a run in which one batch holds sequences of length 0."""
    model, optimizer = attending()
    one = trained(_squares)
    played = tutti.distribute(one, model, optimizer, layout) if layout is not None else None
    found = []
    for length in (3, 0, 3):
        tokens = torch.ones(4, length, dtype=torch.long)
        found.append(float(played(tokens) if played else one(model, optimizer, tokens)))
    return found


@cache
def eager_lengths() -> list[float]:
    return lengths_played(None)


@pytest.mark.parametrize("layout", ["", "micro=2"])
def test_sequences_of_length_0_are_those_of_one_device(layout: str) -> None:
    assert lengths_played(layout) == pytest.approx(eager_lengths(), rel=1e-10)


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "seq=2", "data=2 micro=2"])
def test_ranks_play_sequences_of_length_0(ranks: Ranks, layout: str) -> None:
    for found in ranks.run(lengths_played, layout, n=2):
        assert found == pytest.approx(eager_lengths(), rel=1e-10)


@pytest.mark.parametrize("layout", ["data=2", "micro=2", "data=2 zero=3", "seq=2", "tensor=2"])
def test_verify_plays_sequences_of_length_0(layout: str) -> None:
    tokens = torch.zeros(4, 0, dtype=torch.long)
    assert tutti.verify(trained(_squares), *attending(), [tokens], layout).ok


def test_stages_without_work_are_refused() -> None:
    tokens = torch.zeros(4, 0, dtype=torch.long)
    with pytest.raises(LayoutError, match="leave out batches whose tensors have no elements"):
        tutti.verify(trained(_squares), *attending(), [tokens], "pipe=2 micro=2")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "tensor=2", "remat=full"])
def test_parameters_without_elements_are_played(layout: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.none = nn.Linear(4, 4), nn.Linear(4, 0)
            self.rows = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.linear(x), self.none(x)], -1) + self.rows.sum()

    model = Odd().double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    assert tutti.verify(
        trained(_squares), model, optimizer, [torch.randn(4, 4).double()], layout
    ).ok
