"""A script that puts other state in place between calls: a new head, a resized embedding, cleared slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks
from tutti.errors import CaptureError

CALLS, AT = 5, 1
LAYOUTS = [
    ("data=2 zero=1", 2),
    ("data=2 zero=3", 2),
    ("pipe=2 micro=2", 2),
    ("data=2 tensor=2 zero=1", 4),
]


class Model(nn.Module):
    """An embedding, two layers and a head, which may share the embedding's weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 12, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of tokens (n,)."""
        return self.head(self.layers(self.embedding(x)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), (x + 1) % 12)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def new_head(model: Any, optimizer: Any) -> None:
    model.head = nn.Linear(8, 16)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def wider_layers(model: Any, optimizer: Any) -> None:
    model.layers[0], model.layers[2] = nn.Linear(8, 12), nn.Linear(12, 8)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def resized(model: Any, optimizer: Any) -> None:
    """As Hugging Face resizes: new memory for the weights, within a block of whole weights."""
    with tutti.whole(model), torch.no_grad():
        for module, key in ((model.embedding, "num_embeddings"), (model.head, "out_features")):
            old = module.weight.detach()
            if old.shape[0] == 12:
                more = torch.cat([old, torch.ones(4, 8).to(old) / 8])
                module.weight.data = more
            setattr(module, key, 16)
        model.head.bias = nn.Parameter(torch.zeros(16)) if model.head.bias is not None else None
    optimizer.state.clear()
    optimizer.param_groups[0]["params"] = list(model.parameters())


def cleared(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def another_state(model: Any, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def one_dropped(model: Any, optimizer: Any) -> None:
    optimizer.state.pop(model.layers[0].weight)


CHANGES: list[Callable[[Any, Any], None]] = [
    *(new_head, wider_layers, resized, cleared, another_state, one_dropped),
]


def trained(change: str, tied: bool, layout: str | None) -> list[np.ndarray]:
    """The losses, the weights and the slots at the end; by plain PyTorch without a layout."""
    torch.manual_seed(0)
    model = Model(tied=tied).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = None if layout is None else tutti.distribute(train_step, model, optimizer, layout)
    losses = []
    for call in range(CALLS):
        x = torch.randint(12, (8,), generator=torch.Generator().manual_seed(call))
        losses.append(float(step(x) if step is not None else train_step(model, optimizer, x)))
        if call == AT:
            torch.manual_seed(1)
            next(f for f in CHANGES if f.__name__ == change)(model, optimizer)
            model.double()
    with tutti.whole(model, slots=True):
        found = [np.asarray(losses)]
        for p in model.parameters():
            found += [x.detach().numpy().copy() for x in (p, *optimizer.state[p].values())]
    return found


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_as_on_one_device(
    ranks: Ranks, change: Callable[[Any, Any], None], layout: str, n: int
) -> None:
    tied = change is resized
    expected = trained(change.__name__, tied, None)
    for found in ranks.run(trained, change.__name__, tied, layout, n=n):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_one_device(change: Callable[[Any, Any], None]) -> None:
    for tied in (False, True) if change is resized else (False,):
        both = trained(change.__name__, tied, ""), trained(change.__name__, tied, None)
        for x, y in zip(*both, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def test_another_shape_in_the_same_module_is_refused() -> None:
    torch.manual_seed(0)
    model: Any = Model(tied=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.distribute(train_step, model, optimizer)
    step(torch.arange(8))
    model.head.weight, model.head.bias = (
        nn.Parameter(torch.ones(16, 8)),
        nn.Parameter(torch.ones(16)),
    )
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(CaptureError, match=r'"head.weight" is \[16, 8\] now, and was \[12, 8\]'):
        step(torch.arange(8))


def configured(changed: str, only: bool) -> str:
    """The error of a step whose model has a configuration of Hugging Face that rank 0, or each, changes."""
    from transformers import PretrainedConfig

    torch.manual_seed(0)
    model: Any = Model(tied=False)
    model.config = PretrainedConfig()
    model.config.alpha = 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.distribute(train_step, model, optimizer, "data=2")
    step(torch.arange(8))
    if not only or torch.distributed.get_rank() == 0:
        setattr(model.config, changed, "another")
    try:
        step(torch.arange(8))
    except tutti.CommError as error:
        return str(error)
    return ""


def test_a_save_on_one_rank_changes_no_step(ranks: Ranks) -> None:
    """`save_pretrained` writes `architectures` and `dtype` into the configuration."""
    assert ranks.run(configured, "architectures", True, n=2) == ["", ""]
    assert ranks.run(configured, "dtype", True, n=2) == ["", ""]
    assert ranks.run(configured, "alpha", False, n=2) == ["", ""]


def test_a_change_on_one_rank_is_named(ranks: Ranks) -> None:
    for text in ranks.run(configured, "alpha", True, n=2):
        assert "traced anew (another value of config.alpha) on rank 0, program 1 on rank 1" in text
