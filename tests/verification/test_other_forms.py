"""Models of speech and of recommendation: CTC losses and bags of embeddings are split like other ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import Loss, same_step
from tutti.report.explanation import explain

LAYOUTS = ("data=2 zero=3", "data=2 micro=2", "tensor=2")
TIME, SAMPLES, CLASSES, LONGEST = 5, 8, 6, 2
IN_ORDER = torch.Generator().manual_seed(0)


def classes(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=IN_ORDER)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=IN_ORDER)


class Speech(nn.Module):
    """Scores of classes over time, (T, N, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.hears, self.says = nn.GRU(5, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, sound: Tensor) -> Tensor:
        return self.says(self.hears(sound)[0]).log_softmax(-1).transpose(0, 1)


class Heard(nn.Module):
    """The same of each moment alone: a short program, where the lengths are the case."""

    def __init__(self) -> None:
        super().__init__()
        self.says = nn.Linear(5, CLASSES)

    def forward(self, sound: Tensor) -> Tensor:
        return self.says(sound).log_softmax(-1).transpose(0, 1)


class Taste(nn.Module):
    """Numbers and bags of things seen, as DLRM has them."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.things = nn.EmbeddingBag(12, 4, mode=mode, padding_idx=0)
        self.numbers, self.top = nn.Linear(5, 4), nn.Linear(8, 1)

    def forward(self, dense: Tensor, *seen: Tensor) -> Tensor:
        return self.top(torch.cat([self.things(*seen), self.numbers(dense).relu()], 1)).squeeze(1)


def ctc(model: nn.Module, sound: Tensor, said: Tensor, long: Tensor, length: Tensor) -> Tensor:
    return F.ctc_loss(model(sound), said, long, length)


def masked_ctc(model: nn.Module, sound: Tensor, said: Tensor, heard: Tensor) -> Tensor:
    """Lengths come from masks; class 2 is the blank one, and paths that do not fit count nothing."""
    long, length = heard.sum(1), (said > 2).sum(1, dtype=torch.int32)
    loss = F.ctc_loss(model(sound), said, long.int(), length, 2, "none", zero_infinity=True)
    return loss.sum()


def listed_ctc(model: nn.Module, sound: Tensor, said: Tensor) -> Tensor:
    lengths: Any = [2, 1, 0, 1, 1, 2, 2, 1]
    loss: Any = F.ctc_loss  # it is annotated as of tensors only
    return loss(model(sound), said, [TIME] * SAMPLES, lengths, reduction="sum")


def clicked(model: nn.Module, dense: Tensor, click: Tensor, *seen: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(dense, *seen), click)


SOUND = numbers(SAMPLES, TIME, 5)
SAID = classes(1, CLASSES, SAMPLES, LONGEST)
LENGTHS = classes(LONGEST * 2, TIME + 1, SAMPLES), classes(1, LONGEST + 1, SAMPLES)
HEARD = torch.arange(TIME) < LENGTHS[0].unsqueeze(1)
SEEN = classes(0, 12, SAMPLES, 3)
CLICKS = numbers(SAMPLES, 5), (numbers(SAMPLES) > 0).float()
OFFSETS = torch.tensor([0, 3, 3, 5, 9, 10, 16, 16])

STEPS: dict[str, tuple[Loss, Any, tuple[Tensor, ...]]] = {
    "ctc": (ctc, Speech, (SOUND, SAID, *LENGTHS)),
    "ctc, lengths of masks": (masked_ctc, Heard, (SOUND, SAID, HEARD)),
    "ctc, lists of lengths": (listed_ctc, Heard, (SOUND, SAID.reshape(-1)[:10])),
    "sums of bags": (clicked, lambda: Taste("sum"), (*CLICKS, SEEN)),
    "means of bags": (clicked, lambda: Taste("mean"), (*CLICKS, SEEN)),
    "maxima of bags": (clicked, lambda: Taste("max"), (*CLICKS, SEEN)),
    "sums of uneven bags": (clicked, lambda: Taste("sum"), (*CLICKS, SEEN.reshape(-1), OFFSETS)),
    "maxima of uneven bags": (clicked, lambda: Taste("max"), (*CLICKS, SEEN.reshape(-1), OFFSETS)),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_same_step(name: str) -> None:
    loss_of, made, batch = STEPS[name]
    torch.manual_seed(0)
    model = made()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    for program in same_step(loss_of, model, optimizer, batch, *LAYOUTS):
        assert "predicted" in explain(program)
