"""What a trace calls in another form has the values and gradients of PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from other_forms import traced, with_gradients
from tutti.capture.step import capture
from tutti.capture.substitutes.other_forms import OTHER_FORMS
from tutti.errors import CaptureError
from tutti.graph.ops.ctc import ctc_loss, ctc_slopes

aten = torch.ops.aten
LOSS: Any = F.ctc_loss  # it is annotated as of tensors only
TIME, SAMPLES, CLASSES, LONGEST = 7, 4, 5, 3
INPUTS, TARGETS = [7, 6, 7, 5], [3, 1, 0, 2]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def log_probs() -> Tensor:
    scores = torch.randn(TIME, SAMPLES, CLASSES, generator=generator(), dtype=torch.float64)
    return scores.log_softmax(-1)


def labels() -> Tensor:
    return torch.randint(1, CLASSES, (SAMPLES, LONGEST), generator=generator())


def flat() -> Tensor:
    return torch.cat([row[:n] for row, n in zip(labels(), TARGETS, strict=True)])


def counted(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor(INPUTS, dtype=dtype), torch.tensor(TARGETS, dtype=dtype)


CTC_CALLS: dict[str, tuple[Any, ...]] = {
    "rows, lists": (labels(), INPUTS, TARGETS),
    "rows, int64": (labels(), *counted(torch.int64)),
    "rows, int32": (labels(), *counted(torch.int32)),
    "one after the other, lists": (flat(), INPUTS, TARGETS),
    "one after the other, int64": (flat(), *counted(torch.int64)),
    "no path fits": (labels(), [7, 6, 7, 1], TARGETS),
}


@pytest.mark.parametrize("zero_infinity", (False, True))
@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
@pytest.mark.parametrize("name", CTC_CALLS)
def test_ctc_loss_is_the_same_to_the_bit(name: str, reduction: str, zero_infinity: bool) -> None:
    targets, *lengths = CTC_CALLS[name]

    def loss(x: Tensor) -> Tensor:
        return LOSS(x, targets, *lengths, 0, reduction, zero_infinity)

    want = with_gradients(loss, log_probs())
    have, ops = traced(partial(with_gradients, loss), log_probs())
    assert ctc_slopes in ops
    for x, y in zip(have, want, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lengths", ((7, 3), (torch.tensor(7), torch.tensor(3))))
def test_ctc_loss_of_one_sample(lengths: tuple[Any, Any]) -> None:
    given = [x if isinstance(x, Tensor) else (x,) for x in lengths]
    x, targets = log_probs()[:, 0], labels()[0]

    def loss(x: Tensor) -> Tensor:
        return LOSS(x, targets, *given)

    want = with_gradients(loss, x)
    have, _ = traced(partial(with_gradients, loss), x)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def test_ctc_loss_without_a_gradient_works_none_out() -> None:
    call = CTC_CALLS["rows, int64"]
    have, ops = traced(lambda x: LOSS(x, *call), log_probs())
    assert torch.equal(have, LOSS(log_probs(), *call))
    assert ctc_loss in ops and ctc_slopes not in ops


def test_a_gradient_that_the_forward_does_not_know_of() -> None:
    call = CTC_CALLS["one after the other, int64"]
    have, _ = traced(lambda x: torch.func.grad(lambda x: LOSS(x, *call))(x), log_probs())
    x = log_probs().requires_grad_()
    assert torch.equal(have, torch.autograd.grad(LOSS(x, *call), x)[0])

    def by_hand(x: Tensor) -> Tensor:
        given = (x, *CTC_CALLS["rows, int64"])
        losses, saved = OTHER_FORMS[aten._ctc_loss.Tensor](*given)
        grad = torch.full_like(losses, 0.5)
        return OTHER_FORMS[aten._ctc_loss_backward.Tensor](grad, *given, losses, saved, 0)

    _, whole = with_gradients(lambda x: LOSS(x, *CTC_CALLS["rows, int64"], reduction="sum"), x)
    assert torch.equal(by_hand(log_probs()), whole * 0.25)  # its cotangent is 2


@pytest.mark.parametrize("op", (ctc_loss, ctc_slopes))
def test_a_target_that_is_too_long_raises_as_in_pytorch(op: Any) -> None:
    lengths = torch.tensor(INPUTS), torch.tensor([LONGEST + 1] * SAMPLES)
    with pytest.raises(RuntimeError, match="size at least 4 at dimension 1"):
        op(log_probs(), labels(), *lengths, 0, False)


def test_lengths_that_do_not_add_up_are_refused_with_the_line() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return LOSS(model(x), y, INPUTS, [1] * SAMPLES)  # here

    model = nn.Linear(CLASSES, CLASSES).double()
    with pytest.raises(CaptureError, match="add up to 4, and there are 6 targets") as error:
        capture(step, model, None, (log_probs(), flat()))
    assert "# here" in str(error.value)


ROWS, WIDTH = 6, 3
UNEVEN = torch.tensor([0, 2, 2, 5, 9])


def table() -> Tensor:
    """Rows 1 and 4 are equal: a maximum of both has its gradient in one of them."""
    weight = torch.randn(ROWS, WIDTH, generator=generator(), dtype=torch.float64)
    weight[4] = weight[1]
    return weight


# Bags with both of the equal rows; and of row 2 alone, which may be padding.
EVEN_BAGS = torch.tensor([[4, 1, 0], [2, 2, 2], [1, 4, 2], [3, 5, 1]])
BAGS: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "rows": (EVEN_BAGS, {}),
    "rows, int32": (EVEN_BAGS.int(), {}),
    "even offsets": (EVEN_BAGS.reshape(-1), {"offsets": 3}),
    "offsets": (EVEN_BAGS.reshape(-1), {"offsets": UNEVEN}),
    "offsets of int32": (EVEN_BAGS.reshape(-1).int(), {"offsets": UNEVEN.int()}),
    "the last is the end": (
        EVEN_BAGS.reshape(-1),
        {"offsets": torch.tensor([0, 2, 2, 5, 12]), "include_last_offset": True},
    ),
}


def bag_of(name: str, **named: Any) -> Callable[..., Tensor]:
    indices, options = BAGS[name]

    def call(weight: Tensor, by_sample: Tensor | None = None) -> Tensor:
        given = dict(options)
        if isinstance(given.get("offsets"), int):
            given["offsets"] = torch.arange(0, indices.numel(), given["offsets"])
        return F.embedding_bag(indices, weight, **given, per_sample_weights=by_sample, **named)

    return call


@pytest.mark.parametrize("padding_idx", (None, 2, -4))
@pytest.mark.parametrize("mode", ("sum", "mean", "max"))
@pytest.mark.parametrize("name", BAGS)
def test_embedding_bags(name: str, mode: str, padding_idx: int | None) -> None:
    call = bag_of(name, mode=mode, padding_idx=padding_idx)
    want = with_gradients(call, table())
    have, ops = traced(partial(with_gradients, call), table())
    torch.testing.assert_close(have, want, rtol=1e-14, atol=1e-14)
    assert not [op for op in ops if "embedding_bag" in str(op)]
    assert (aten.searchsorted.Tensor in ops) == (
        name not in ("rows", "rows, int32", "even offsets")
    )


@pytest.mark.parametrize("padding_idx", (None, 2))
@pytest.mark.parametrize("name", BAGS)
def test_weights_of_samples_have_gradients(name: str, padding_idx: int | None) -> None:
    by_sample = torch.rand(BAGS[name][0].shape, generator=generator(), dtype=torch.float64)
    call = bag_of(name, mode="sum", padding_idx=padding_idx)
    want = with_gradients(call, table(), by_sample)
    have, _ = traced(partial(with_gradients, call), table(), by_sample)
    torch.testing.assert_close(have, want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("named", ({"scale_grad_by_freq": True}, {"sparse": True}))
def test_other_gradients_are_left_to_the_op(named: dict[str, bool]) -> None:
    call = bag_of("rows", mode="sum", **named)
    have, ops = traced(lambda w: call(w), table())
    assert torch.equal(have, call(table()))
    assert [op for op in ops if "embedding_bag" in str(op)]


def test_the_op_checks_its_arguments_as_ever() -> None:
    call = bag_of("rows", mode="sum")
    with pytest.raises(RuntimeError, match="per_sample_weights"):
        traced(call, table(), torch.ones(EVEN_BAGS.shape))
