"""Shards between steps: what is right on parts is played, what needs the other parts is refused by name."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import tutti
from ranks import Ranks
from small_steps import step as train_step

ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "number": lambda p: p * 0.5,
    "in place": lambda p: p.clone().mul_(0.5),
    "with itself": lambda p: p * p + p.abs().sqrt(),
    "whole operand": lambda p: p + torch.arange(8.0).view(8, 1),
    "scalar operand": lambda p: p * torch.tensor(2.0),
    "row": lambda p: torch.arange(4.0) * p,
    "clamp": lambda p: p.clamp(-0.1, 0.1),
    "copy": lambda p: p.clone().copy_(torch.ones(8, 4)),
    "half": lambda p: p.bfloat16().float(),
    "mask": lambda p: torch.where(p > 0, p, torch.zeros(())),
    "several": lambda p: torch._foreach_mul([p, p], 2.0)[1],
    "lerp of several": lambda p: _lerped(p),
    "data": lambda p: _assigned(copy.deepcopy(p)),
}
NEEDS_ALL: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm().item(),
    "sum": lambda p: float(p.sum()),
    "mean": lambda p: p.mean().item(),
    "max": lambda p: p.abs().max(),
    "any": lambda p: p.isnan().any().item(),
    "equal": lambda p: torch.equal(p, p),
    "random": lambda p: nn.init.normal_(p),
    "like": lambda p: torch.randn_like(p),
    "orthogonal": lambda p: nn.init.orthogonal_(p),
    "rows": lambda p: p[0],
    "view": lambda p: p.view(-1),
    "into a whole": lambda p: torch.ones(8, 4).add_(p.detach()),
    "another shape": lambda p: setattr(p, "data", torch.ones(4, 4)),
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, 4), p),
    "numpy": lambda p: p.detach().numpy(),
    "list": lambda p: p.tolist(),
    "file": lambda p: torch.save(p, io.BytesIO()),
    "file of safetensors": lambda p: safetensors.torch.save({"weight": p.detach()}),
    "address": lambda p: p.data_ptr(),
    "memory": lambda p: p.share_memory_(),
    "norms of several": lambda p: torch._foreach_norm([p, p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
}


def _lerped(p: Any) -> Any:
    mean = p.detach().clone()
    torch._foreach_lerp_([mean], [p.detach() * 3], 0.25)
    return mean


def _assigned(p: Any) -> Any:
    p.data = torch.arange(32.0).view(8, 4)
    return p


def both() -> tuple[nn.Linear, torch.Tensor]:
    """A model in shards after a step, and its weight as it is whole."""
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = tutti.distribute(train_step, model, optimizer, "data=2 zero=3")
    step(torch.ones(8, 4))
    return model, step.model_state()["weight"]


def elementwise() -> dict[str, bool]:
    model, whole = both()
    found = {}
    for name, compute in ELEMENTWISE.items():
        given: Any = compute(model.weight)
        assert isinstance(given, DTensor) and given.to_local().shape[0] == 4, name
        found[name] = torch.equal(given.full_tensor(), compute(whole))
    return found


def test_elementwise_operations_are_right_on_parts(ranks: Ranks) -> None:
    for found in ranks.run(elementwise, n=2):
        assert all(found.values()), found


def refusals() -> dict[str, str]:
    model, whole = both()
    found = {}
    for name, compute in NEEDS_ALL.items():
        with pytest.raises(tutti.TuttiError) as caught:
            compute(model.weight)
        found[name] = str(caught.value)
    assert torch.equal(model.weight.full_tensor(), whole)  # type: ignore[operator]
    return found


def test_what_needs_all_is_refused_with_the_line_and_a_fix(ranks: Ranks) -> None:
    for found in ranks.run(refusals, n=2):
        for name, text in found.items():
            shown = name in ("any", "max") or '"weight"' in text
            assert shown and "in shards" in text, text
            assert "test_shards.py" in text.splitlines()[1] and "step.whole()" in text, text


def of_the_model() -> list[str]:
    """Raw errors of PyTorch do not come through: the model called, its state pickled; it takes a dtype."""
    model, _ = both()
    said = []
    for use in (
        lambda: model(torch.ones(2, 4)),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(tutti.TuttiError) as caught:
            use()
        said.append(str(caught.value))
    model.double()
    assert model.weight.dtype == torch.float64
    return said


def test_a_model_in_shards_says_so(ranks: Ranks) -> None:
    for said in ranks.run(of_the_model, n=2):
        assert all("in shards" in text and "step.model_state()" in text for text in said)


def held() -> tuple[bool, float, int]:
    """A parameter held since before the first step: whether it is the one of now, whole in a block too."""
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    own: Any = model.weight
    own.tag = "kept"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.distribute(train_step, model, optimizer, "data=2 zero=3")
    step(torch.ones(8, 4))
    with torch.no_grad():
        own.mul_(0.5)
    own.data = own.data + 1
    with pytest.raises(tutti.TuttiError, match="in shards"):
        own.sum()
    same = torch.equal(own.full_tensor(), step.model_state()["weight"])
    assert tuple(own.shape) == (8, 4) and own.requires_grad and model.weight.tag == "kept"
    with step.whole():
        same &= torch.equal(own, model.weight)
        with torch.no_grad():
            own[0] = 7.0
    step(torch.ones(8, 4))
    own_nbytes = torch._C.TensorBase.untyped_storage(own).nbytes()
    return same, step.model_state()["weight"][0].mean().item(), own_nbytes


def test_a_parameter_held_since_before_stands_for_the_shard(ranks: Ranks) -> None:
    for same, row, _ in ranks.run(held, n=2):
        assert same and 6 < row < 8


def onlookers(layout: str) -> list[int]:
    """How many warnings come without, and with a state dict that is kept."""
    found = []
    for keep in (False, True):
        model = nn.Linear(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step = tutti.distribute(train_step, model, optimizer, layout)
        kept = model.state_dict() if keep else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(torch.ones(8, 4))
        found.append(sum("shares the memory" in str(w.message) for w in caught))
        del kept
    return found


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1", "data=2 zero=3"])
def test_what_looks_at_memory_that_is_left_is_told(ranks: Ranks, layout: str) -> None:
    for found in ranks.run(onlookers, layout, n=2):
        assert found == [0, int("zero" in layout)]


def normalized(layout: str) -> list[str]:
    """The warnings for weights whose module has a view of them that it computes anew in each forward, and for
    a weight that gets another name."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = tutti.distribute(train_step, model, optimizer, layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(torch.ones(8, 4))
        with tutti.whole(model):
            nn.utils.parametrizations.weight_norm(model[1])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        tutti.distribute(train_step, model, optimizer, layout)(torch.ones(8, 4))
    return [str(w.message) for w in caught if "shares the memory" in str(w.message)]


@pytest.mark.parametrize("layout", ["data=2 zero=1", "data=2 zero=3", "tensor=2"])
def test_what_a_module_computes_anew_is_no_onlooker(ranks: Ranks, layout: str) -> None:
    assert ranks.run(normalized, layout, n=2) == [[], []]
