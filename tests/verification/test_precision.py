"""`precision=bf16` under every layout: the same step as one device with the same word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tutti
import zoo
from subjects import program, subject, verdict
from tutti.layout import Layout

# A GPT, HF Llama, batch norm, dropout and a tied weight, its own autocast, recomputation, accumulation,
# two backwards, no optimizer.
CASES = (
    *("gpt", "llama", "resnet", "gpt_tied", "autocast"),
    *("checkpoint", "accumulate", "two_losses", "eval"),
)
LAYOUTS = ("", "data=2", "data=2 zero=1", "data=2 zero=2")
HYBRIDS = ("data=2 tensor=2 zero=3", "data=2 seq=2 tensor=2")


# Every layout for one; for the others, which differ in their ops, one that splits all there is.
EACH = [("gpt", layout) for layout in (*LAYOUTS, *HYBRIDS)]
EACH += [("llama", layout) for layout in ("", *HYBRIDS[1:])]
EACH += [(name, "data=2 zero=3") for name in CASES if name not in ("gpt", "llama")]


@pytest.mark.parametrize(("name", "layout"), EACH)
def test_partition_is_exact_and_capture_is_the_eager_step_under_autocast(
    name: str, layout: str
) -> None:
    made = program(name, f"{layout} precision=bf16".strip())
    found = verdict(name, str(made.layout))
    assert made.fallbacks == []
    assert found.ok, str(found)
    assert found.max_error < 1e-9
    assert "precision=bf16" in str(found)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_capture_is_far_nearer_to_autocast_than_float32_is(name: str) -> None:
    """Else the comparison would pass for a capture that leaves the word out."""
    _, model, _, batches = zoo.CASES[name].build()
    tokens = batches[0][0]
    plain, half = (
        tutti.distribute(logits, model, layout=word)(tokens).float()
        for word in ("", "precision=bf16")
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = logits(model, tokens).float()
    assert (half - eager).abs().max() <= 0.1 * (plain - eager).abs().max()


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model.eval()(tokens)
    return out if isinstance(out, Tensor) else out.logits


def test_one_subject_is_for_one_precision() -> None:
    with pytest.raises(AssertionError, match="captured in bf16"):
        subject("eval", "bf16").program(Layout.parse("data=2"))


def test_verify_takes_the_word_and_leaves_model_and_optimizer_as_they_are() -> None:
    step, model, optimizer, batches = zoo.CASES["sgd"].build()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    found = tutti.verify(step, model, optimizer, batches[0], "data=2 zero=3 precision=bf16")
    assert found.ok and found.layout == "data=2 zero=3 precision=bf16"
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not torch.is_autocast_enabled("cpu")
