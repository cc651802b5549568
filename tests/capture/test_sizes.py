"""A trace with symbols for sizes gives for each batch the graph that a trace of that batch gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from small_steps import trained
from tutti.capture.alike import difference
from tutti.capture.captured import Captured
from tutti.capture.python.sizes import FreeSizes
from tutti.capture.resized import NotResizableError, Resizable
from tutti.capture.step import capture

WIDTH = 8
Shape = tuple[int, ...]


def tokens(shape: Shape) -> tuple[Tensor, ...]:
    return (torch.zeros(shape, dtype=torch.int64),)


def images(shape: Shape) -> tuple[Tensor, ...]:
    return (torch.zeros(shape),)


def two(shape: Shape) -> tuple[Tensor, ...]:
    return (*tokens(shape), *tokens(shape))


def shapes_of(batch: Sequence[Tensor]) -> list[Shape]:
    return [tuple(x.shape) for x in batch]


def traced(
    step: Any, model: nn.Module, optimizer: Any, first: Sequence[Tensor], second: Sequence[Tensor]
) -> Resizable:
    free = FreeSizes.between(shapes_of(first), shapes_of(second))
    return Resizable(capture(step, model, optimizer, second, free=free), free, shapes_of(second))


def of(trace: Resizable, batch: Sequence[Tensor]) -> Captured | None:
    return trace.of(shapes_of(batch), trace.captured.state)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def embedded(rest: nn.Module | None = None) -> nn.Module:
    layers = [nn.Embedding(32, WIDTH), rest or nn.Identity(), nn.Linear(WIDTH, 32)]
    return nn.Sequential(*layers)


class Attention(nn.Module):
    """A mask by hand, positions, a scale that depends on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.places = nn.Linear(WIDTH, 3 * WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = x + self.places(torch.arange(length))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / length**0.5
        ones = torch.ones(length, length, dtype=torch.bool).tril()
        return scores.masked_fill(~ones, float("-inf")).softmax(-1) @ v


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def loss_without_padding(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), ignore_index=0)


def loss_by_size(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).pow(2).sum((1, 2)) / x.shape[1]).mean() * x.numel()


def loss_of_images(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).logsumexp(-1).mean()


def loss_of_transformers(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x).loss


def loss_with_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, x)


def loss_with_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    out: Any = checkpoint(model, x, use_reentrant=False)
    return F.cross_entropy(out.flatten(0, 1), x.flatten())


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32))


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))


def convolutions() -> nn.Module:
    pool, norm = nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), pool, nn.Flatten())


# A trace is made of the second; dims that differ between the first two are symbols. The first is compared,
# too, but for the larger models.
LENGTHS: tuple[Shape, ...] = ((2, 12), (2, 20), (2, 33))
BOTH: tuple[Shape, ...] = ((2, 12), (4, 20), (3, 5))
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, Sequence[Shape]]] = {
    "gpt2": (gpt2, loss_of_transformers, tokens, LENGTHS),
    "llama": (llama, loss_of_transformers, tokens, BOTH),
    "convolutions": (
        convolutions,
        loss_of_images,
        images,
        ((2, 3, 8, 8), (2, 3, 12, 10), (2, 3, 9, 16)),
    ),
    "batches": (embedded, loss_of, tokens, ((4, 8), (6, 8), (8, 8))),
    "attention": (partial(embedded, Attention()), loss_of, tokens, BOTH),
    "sizes in the loss": (embedded, loss_by_size, tokens, BOTH),
    "padding": (embedded, loss_without_padding, two, LENGTHS),
    "dropout": (partial(embedded, nn.Dropout(0.3)), loss_of, tokens, (*LENGTHS, (2, 2))),
    "checkpoint": (partial(embedded, nn.Dropout(0.3)), loss_with_checkpoint, tokens, LENGTHS),
    "autocast": (embedded, loss_with_autocast, tokens, LENGTHS),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_put_in_give_the_graph_of_those_sizes(name: str) -> None:
    model_of, loss, batch_of, shapes = CASES[name]
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    step = trained(loss)
    batches = [batch_of(shape) for shape in shapes]
    trace = traced(step, model, optimizer, *batches[:2])
    first = [] if loss is loss_of_transformers else batches[:1]
    for batch in (*first, *batches[2:]):
        made = of(trace, batch)
        assert made is not None
        assert not difference(made, capture(step, model, optimizer, batch))


def test_graphs_of_other_sizes_are_not_the_same() -> None:
    model = embedded()
    one, other = (capture(trained(loss_of), model, sgd(model), tokens((2, n))) for n in (4, 5))
    assert not difference(one, one)
    assert "the value of" in difference(one, other)


def test_a_trace_holds_on_its_side_of_a_branch() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return loss_of(model, x) * (2 if x.shape[1] > 16 else 1)

    model = embedded()
    step = trained(loss)
    trace = traced(step, model, sgd(model), tokens((2, 4)), tokens((2, 20)))
    assert of(trace, tokens((2, 16))) is None
    made = of(trace, tokens((2, 17)))
    assert made is not None
    assert not difference(made, capture(step, model, sgd(model), tokens((2, 17))))


def test_sizes_of_one_and_ties_that_part_are_none_of_a_trace() -> None:
    model = embedded()
    step = trained(loss_without_padding)
    trace = traced(step, model, sgd(model), two((2, 8)), two((2, 12)))
    assert of(trace, two((2, 1))) is None
    assert of(trace, (*tokens((2, 9)), *tokens((2, 10)))) is None
    assert of(trace, two((3, 9))) is None


def test_a_loop_over_a_size_makes_a_constant_of_it() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return sum((model(x[:, i : i + 1]).mean() for i in range(x.shape[1])), torch.zeros(()))

    model = embedded()
    with pytest.raises(NotResizableError):
        traced(trained(loss), model, sgd(model), tokens((2, 4)), tokens((2, 6)))
