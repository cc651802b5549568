"""The axes of a plan: where they can have an effect, and where not, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.layout_plan import PlanAnswer, PlanQuestion, answer
from tutti.planning.tried_axes import tried_axes
from tutti.propagate.idle_axes import IdleAxisError

TOKENS = torch.zeros(4, 6, dtype=torch.long)
# Few layouts of each axis.
WORDS = "micro=1 remat=none"


class Experts(nn.Module):
    """Every expert sees every token."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, num)
        self.up = nn.Parameter(torch.randn(num, 8, 16))
        self.down = nn.Parameter(torch.randn(num, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("bsd,edh->ebsh", x, self.up))
        made = torch.einsum("ebsh,ehd->ebsd", hidden, self.down)
        return x + torch.einsum("ebsd,bse->bsd", made, self.gate(x).softmax(-1))


def language(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8), *layers, nn.Linear(8, 16))


def train_step(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def square_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def planned(
    step: Any, model: nn.Module, batch: Tensor, given: str = WORDS, **options: Any
) -> PlanAnswer:
    """On two devices."""
    job = Job.of(step, model, torch.optim.SGD(model.parameters(), 0.1), Layout())
    question = PlanQuestion.of(Cluster.parse("2 x h100"), num_ranks=2, given=given, **options)
    return answer(job, (batch,), question)


def axes_of(made: PlanAnswer) -> set[str]:
    return {axis for row in made.ranking.rows for axis in row.estimate.layout.axes}


def test_axes_by_model_and_batch() -> None:
    made = tried_axes(language(Experts(4)), (TOKENS,), {}, 8)
    assert made.names == ("data", "pipe", "tensor", "seq", "expert")
    assert dict(made.most) == {"tensor": 8, "pipe": 4, "seq": 6, "expert": 4}
    assert made.inner == 8 and made.not_tried == ()


def test_a_reason_against_each_axis_that_is_not_tried() -> None:
    """A kernel of three dims is no stack of experts, and an image has no dim of tokens."""
    made = tried_axes(nn.Conv1d(3, 4, 5), (torch.randn(4, 3, 8, 8),), {}, 8)
    assert made.names == ("data", "pipe", "tensor")
    assert made.not_tried == (
        "seq is not tried: no tensor of the batch has a dim of tokens",
        "expert is not tried: no weight stacks experts",
    )
    named = tried_axes(nn.Linear(4, 4), (torch.randn(4, 4),), {"weight": "expert+seq, -"}, 8)
    assert named.names[-2:] == ("seq", "expert") and named.not_tried == ()


def test_one_long_sample_is_split_over_seq() -> None:
    """`data` cannot split it."""
    made = planned(train_step, language(nn.Linear(8, 8)), TOKENS[:1])
    assert "seq" in axes_of(made) and "data" not in axes_of(made)
    # Six tokens over 4 ranks do not divide.
    model = language(nn.Linear(8, 8))
    job = Job.of(train_step, model, torch.optim.SGD(model.parameters(), 0.1), Layout())
    programs = CandidatePrograms(job, (TOKENS[:1],), refuses_idle=True)
    with pytest.raises(IdleAxisError, match="seq=4 splits nothing"):
        programs.program(Layout.parse("seq=4"))
    assert (
        CandidatePrograms(job, (TOKENS[:1],)).program(Layout.parse("seq=4")).layout.num_ranks == 4
    )


def test_enough_samples_need_no_seq() -> None:
    made = planned(train_step, language(nn.Linear(8, 8)), TOKENS, "remat=none")
    assert "seq" not in axes_of(made)
    assert any("layouts with seq are not tried" in text for text in made.not_tried)


def test_less_than_a_sample_on_a_rank_where_memory_is_short() -> None:
    model, long = language(nn.Linear(8, 8)), torch.zeros(2, 512, dtype=torch.long)
    made = planned(train_step, model, long, "remat=none", capacity=1.0)
    peaks = {row.layout: row.estimate.peak_nbytes for row in made.ranking.rows}
    assert peaks["seq=2 micro=2"] < min(peaks["data=2"], peaks["data=2 zero=3"])
    assert not any("seq" in text for text in made.not_tried)


def test_experts_are_split_or_left_out() -> None:
    made = planned(train_step, language(Experts(4)), TOKENS)
    assert "expert=2" in [row.layout for row in made.ranking.rows]
    three = planned(train_step, language(Experts(3)), TOKENS)
    assert "expert" not in axes_of(three)
    assert {why for layout, why in three.ranking.left_out if "expert" in layout} == {
        "expert=2 splits nothing of this step"
    }


def test_a_model_that_tensor_cannot_split() -> None:
    """Seven does not divide by two."""
    made = planned(square_step, nn.Linear(7, 7), torch.randn(4, 7))
    assert axes_of(made) == {"data"}
    assert {why for _, why in made.ranking.left_out} == {"tensor=2 splits nothing of this step"}
    even = planned(square_step, nn.Linear(7, 8), torch.randn(4, 7))
    assert "tensor" in axes_of(even) and even.ranking.left_out == ()
