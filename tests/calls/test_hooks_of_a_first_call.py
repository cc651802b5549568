"""A library may add hooks to its modules in their first call: each trace begins with those of before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.errors import CaptureError
from tutti.job import Job
from tutti.layout import Layout
from tutti.planning.candidate_programs import CandidatePrograms


class Recorded(nn.Module):
    """Adds up what its layers return, by hooks of the first call, as the hidden states of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.outputs: list[Tensor] = []
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, y: self.outputs.append(y))
        x = self.layers(x)
        found = sum(y.square().mean() for y in self.outputs)
        self.outputs.clear()
        return x.square().mean() + found


class Counted(Recorded):
    """The number of calls so far changes the step: it has a second trace, with the number as an input."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 + 0.5 * self.calls)


class Guarded(Recorded):
    """A check that a first trace fails."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        return loss


class Refused(Recorded):
    """A shape by values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[x > 0].sum()


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def made(kind: type[Recorded]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 4, generator=generator).double() for n in (4, 4, 6, 4)]


def losses(train_step: Any, *given: Any) -> list[float]:
    return [float(train_step(*given, x)) for x in batches()]


@pytest.mark.parametrize("kind", [Recorded, Counted, Guarded])
def test_as_eager(kind: type[Recorded]) -> None:
    want = losses(step, *made(kind))
    assert losses(tutti.distribute(step, *made(kind))) == pytest.approx(want, rel=1e-12)


def test_verify_finds_the_same_step() -> None:
    verdict = tutti.verify(step, *made(Recorded), (batches()[0],), "data=2")
    assert verdict.ok, str(verdict)


def test_a_plan_leaves_no_hooks() -> None:
    want = losses(step, *made(Recorded))
    model, optimizer = made(Recorded)
    job = Job.of(step, model, optimizer, Layout())
    CandidatePrograms(job, (batches()[0],)).program(Layout.parse("data=2"))
    assert losses(tutti.distribute(step, model, optimizer)) == pytest.approx(want, rel=1e-12)


def test_a_refused_step_leaves_no_hooks() -> None:
    model, optimizer = made(Refused)
    with pytest.raises(CaptureError):
        tutti.distribute(step, model, optimizer)(batches()[0])
    assert not any(layer._forward_hooks for layer in model.modules())
