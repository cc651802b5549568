"""Values that a step leaves in modules for inspection: numbers are kept, tensors are not, and say so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks
from small_steps import trained

Keep = Callable[[Any, Tensor], Tensor | None]
LAYOUTS = ["data=2 zero=3", "pipe=2 micro=2", "tensor=2"]


class Block(nn.Module):
    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(6, 6), keep
        self.log: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        changed = self.keep(self, y)
        return y if changed is None else changed


def distributed(keep: Keep, layout: str = "") -> tuple[Any, nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(keep) for _ in range(4))).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = trained(lambda model, x: model(x).square().mean())
    return (
        tutti.distribute(step, model, optimizer, layout) if layout != "eager" else None,
        model,
        torch.randn(8, 6).double(),
    )


def in_none(block: Any, y: Tensor) -> None:
    block.last = y.detach().square().mean()


def in_a_new_attribute(block: Any, y: Tensor) -> None:
    block.new = y.detach().abs().max()


def in_a_dict(block: Any, y: Tensor) -> None:
    block.log["mean"] = y.detach().mean()
    block.log["largest"] = y.max()


def in_another_dict(block: Any, y: Tensor) -> None:
    block.log = {"mean": y.detach().mean(), "sums": (y.detach().sum(), y.abs().sum()[None])}


def read_in_the_same_step(block: Any, y: Tensor) -> Tensor:
    block.last = y.square().mean()
    return y + 0.01 * block.last


NUMBERS = [in_none, in_a_new_attribute, in_a_dict, in_another_dict, read_in_the_same_step]


def left_in(model: nn.Module) -> list[float]:
    """The numbers in the blocks of a model."""
    found: list[Any] = []
    for block in model.children():
        log: Any = block.log
        found += [getattr(block, "new", None), block.last, *log.values()]
    flat = [y for x in found if x is not None for y in (x if isinstance(x, tuple) else (x,))]
    return [float(x) for x in flat]


def after_each_call(keep: Keep, layout: str) -> list[list[float]]:
    """The numbers after each of three calls; `layout` "eager" is without tutti."""
    step, model, x = distributed(keep, layout)
    if step is None:
        train = trained(lambda model, x: model(x).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = lambda x: train(model, optimizer, x)  # noqa: E731
    found = []
    for _ in range(3):
        step(x)
        found.append(left_in(model))
    if layout != "eager":
        assert step._num_traces == 1
        assert not [name for name in step.state_dict() if name.startswith("python.")]
    return found


@pytest.mark.parametrize("keep", NUMBERS, ids=lambda x: x.__name__)
def test_numbers_are_kept(keep: Keep) -> None:
    expected = after_each_call(keep, "eager")
    assert all(len(numbers) >= 4 for numbers in expected)
    assert after_each_call(keep, "") == expected


@pytest.mark.parametrize("keep", NUMBERS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_numbers_of_one_device(ranks: Ranks, keep: Keep, layout: str) -> None:
    if keep is read_in_the_same_step:
        layout = layout.replace(" micro=2", "")  # it couples the samples of a batch
    expected = after_each_call(keep, "eager")
    for found in ranks.run(after_each_call, keep, layout, n=2):
        for numbers, wanted in zip(found, expected, strict=True):
            assert numbers == pytest.approx(wanted, rel=1e-12)


def activation(block: Any, y: Tensor) -> None:
    block.last = y.detach()
    block.log["output"] = [y]


def uses_of(model: Any) -> list[Callable[[], Any]]:
    last = model[0].last
    return [
        lambda: last + 1,
        lambda: 1 - last,
        lambda: float(last),
        lambda: last.mean(),
        lambda: torch.stack([last, last]),
        lambda: last[0],
        lambda: last > 0,
        lambda: f"{last:.3f}",
        lambda: model[0].log["output"][0],
        lambda: [*last],
        lambda: bool(last),
    ]


def test_tensors_are_not_kept_and_say_so() -> None:
    step, model, x = distributed(activation)
    with torch.no_grad():
        model(x)  # leaves tensors there, which would be of an earlier call
    step(x)
    for use in uses_of(model):
        with pytest.raises(
            tutti.TuttiError, match=r"0\.(last|log\['output'\]) is not kept after a"
        ):
            use()
    assert (
        repr(model[0].last) == "<0.last: tensor of shape [8, 6], not kept after a call of the step>"
    )
    assert repr(pickle.loads(pickle.dumps(model[0].last))) == repr(model[0].last)
    assert not hasattr(model[0].last, "missing") and not hasattr(model[0].last, "_fields")
    other = copy.deepcopy(model)
    with torch.no_grad():
        model(x)
        other(x)
    assert model[0].last.shape == other[0].last.shape == (8, 6)
    step(x)
    with pytest.raises(tutti.TuttiError, match="is not kept"):
        model[0].last.mean()
    assert step._num_traces == 1


def test_what_a_step_reads_itself_is_a_value() -> None:
    def keep(block: Any, y: Tensor) -> Tensor:
        block.last = y
        return y + block.last.mean()

    step, model, x = distributed(keep)
    plain = copy.deepcopy(model)
    loss = step(x)
    assert loss.item() == pytest.approx(plain(x).square().mean().item(), rel=1e-12)


def filled_anew(block: Any, y: Tensor) -> Tensor:
    block.seen.clear()
    block.seen.append(y)
    return y + block.seen[0].mean()


class Options:
    def __init__(self, width: int) -> None:
        self.width, self.form = width, Fraction(1, width)


def test_objects_without_tensors_are_made_anew_by_each_trace() -> None:
    def keep(block: Any, y: Tensor) -> Tensor:
        if block.last is None:
            block.last = Options(y.shape[-1])
        return y / block.last.width

    step, model, x = distributed(keep)
    plain: Any = copy.deepcopy(model)
    for batch in (x, x[:4], x[:6]):
        step(batch)
    assert model[0].last is None
    with torch.no_grad():
        assert model(x).shape == plain(x).shape


def test_a_number_may_become_a_tensor() -> None:
    def keep(block: Any, y: Tensor) -> None:
        block.last = 0.0
        block.last = block.last + y.detach().mean()

    step, model, x = distributed(keep)
    for block in model.children():
        block.last = 0.0
    plain: Any = copy.deepcopy(model)
    for k in range(3):
        step(x)
        if not k:
            plain(x)
            assert left_in(model) == left_in(plain)
    assert step._num_traces <= 2


def test_a_list_that_each_call_fills_anew_may_stay() -> None:
    step, model, x = distributed(filled_anew)
    step(x)
    step(x)
    assert model[0].seen == [] and step._num_traces == 1


def coupled(block: Any, y: Tensor) -> None:
    block.last = (y.detach() - y.detach().mean(0)).square().mean()
    block.log["sum"] = y.detach().sum()


@pytest.mark.parametrize("layout", ["micro=2", "data=2 micro=2"])
def test_a_number_that_couples_samples_is_left_out_of_micro_batches(
    ranks: Ranks, layout: str
) -> None:
    def one_device() -> list[float]:
        step, model, x = distributed(coupled)
        return [step(x).item(), step(x).item(), *left_in(model)]

    assert len(one_device()) == 2 + 2 * 4
    for losses, error in ranks.run(left_out, layout, n=2 if "data" in layout else 1):
        assert losses == pytest.approx(one_device()[:2], rel=1e-12)
        assert "0.last is not kept" in error and "needs all samples at once" in error


def left_out(layout: str) -> tuple[list[float], str]:
    step, model, x = distributed(coupled, layout)
    losses = [step(x).item(), step(x).item()]
    with pytest.raises(tutti.TuttiError) as caught:
        float(model[0].last)
    return losses, str(caught.value)


@pytest.mark.parametrize("layout", ["data=2", "data=2 micro=2", "pipe=2 micro=2"])
@pytest.mark.parametrize("keep", [in_a_dict, activation, coupled], ids=lambda x: x.__name__)
def test_verify_takes_several_steps(keep: Any, layout: str) -> None:
    _, model, x = distributed(keep, "eager")
    step = trained(lambda model, x: model(x).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = tutti.verify(step, model, optimizer, (x,), layout, steps=3)
    assert found.ok and found.steps == 3, str(found)
