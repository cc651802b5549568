"""How state is kept: which dim `zero` cuts, what slots follow, and why a tensor stays whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager_on_ranks
from ranks import Ranks
from subjects import program, subject
from tutti.capture.captured import Captured, copied
from tutti.capture.step import capture
from tutti.layout import Layout, Mesh, Sharding
from tutti.propagate.boundaries import insert_boundaries
from tutti.propagate.plan import ShardingPlan, plan
from tutti.propagate.storage_sharding import slot_like, storable, with_zero

MESH = Mesh.parse("data=4 tensor=2")

# Shape, compute sharding, and how it is stored: the first dim if it divides, else the largest that does.
CHOICES = [
    ((8, 64), "-, -", "8@data, 64"),
    ((6, 64), "-, -", "6, 64@data"),
    ((6, 8, 64), "-, -, -", "6, 8, 64@data"),
    ((6, 64, 8), "-, -, -", "6, 64@data, 8"),
    ((16, 64), "tensor, -", "16@tensor+data, 64"),
    ((4, 64), "tensor, -", "4@tensor, 64@data"),
    ((8, 64), "-, tensor", "8@data, 64@tensor"),
    ((6, 8), "-, tensor", "6, 8@tensor+data"),
    ((6, 10), "-, -", None),
    ((2, 6), "tensor, -", None),
    ((), "", None),
    ((4,), "-", "4@data"),
]


# `zero` cuts over both axes of the batch, else over the larger one that divides.
OVER_BOTH = [
    ((8, 64), "-, -", "8@data+seq, 64"),
    ((4, 24), "-, -", "4, 24@data+seq"),
    ((16, 64), "tensor, -", "16@tensor+data+seq, 64"),
    ((4, 6), "-, -", "4@data, 6"),
    ((6, 4), "-, -", "6, 4@data"),
    ((6,), "-", "6@seq"),
    ((16, 8), "seq, -", "16@seq, 8@data"),
    ((5,), "-", None),
]


# A mixture: weights that `expert` does not split are cut over it first, those of experts over the others.
OF_MIXTURES = [
    ((16, 8), "-, -", "16@expert+data+seq, 8"),
    ((16, 8), "expert, -", "16@expert+data+seq, 8"),
    ((2, 64), "expert, -", "2@expert, 64@data+seq"),
    ((2, 6), "expert, -", "2@expert, 6@seq"),
    ((6, 10), "-, -", "6@expert, 10"),
    ((8, 3), "-, -", "8@expert+data, 3"),
    ((4, 8), "-, expert", "4@data, 8@expert"),
]


@pytest.mark.parametrize(
    ("mesh", "shape", "compute", "stored"),
    [
        *(("data=4 seq=2 tensor=2", *one) for one in OVER_BOTH),
        *(("data=4 expert=2 seq=2", *one) for one in OF_MIXTURES),
    ],
)
def test_zero_cuts_over_the_axes_of_the_batch(
    mesh: str, shape: tuple[int, ...], compute: str, stored: str | None
) -> None:
    found = with_zero(Sharding.parse(compute, shape), Mesh.parse(mesh))
    assert (None if found is None else str(found)) == stored


@pytest.mark.parametrize(("shape", "compute", "stored"), CHOICES)
def test_the_dim_that_zero_cuts(shape: tuple[int, ...], compute: str, stored: str | None) -> None:
    found = with_zero(Sharding.parse(compute, shape), MESH)
    assert (None if found is None else str(found)) == stored
    if found is not None:
        # Gathering the new axis is one plain all-gather: it is the minor axis of its dim.
        assert found.divides(MESH) and "data" in found.axes


def test_nothing_to_cut_without_the_axis() -> None:
    assert with_zero(Sharding.whole((8, 8)), Mesh.parse("tensor=2")) is None


def test_slots_lie_as_their_parameter_where_sizes_agree() -> None:
    weight = Sharding.parse("tensor+data, -", (16, 8))
    assert slot_like(weight, (16, 8)) == weight
    assert str(slot_like(weight, (16, 1))) == "16@tensor+data, 1"  # Adafactor's rows
    assert str(slot_like(weight, (1, 8))) == "1, 8"
    assert str(slot_like(weight, ())) == ""


@pytest.mark.parametrize(
    ("compute", "stored"),
    [
        ("3*8@tensor, 8", "24@tensor, 8"),
        ("8@data, 3*8@tensor", "8@data, 24@tensor"),
        ("2*4@data*3*2@tensor", "48@tensor+data"),
        ("3*2@tensor", "6@tensor"),
        ("24@tensor+data, 8", "24@tensor+data, 8"),
    ],
)
def test_a_dim_is_stored_in_contiguous_parts(compute: str, stored: str) -> None:
    """A `DTensor` has no other ones: it would take the rows of q, k and v for one run."""
    assert str(storable(Sharding.parse(compute))) == stored


class Fused(nn.Module):
    """Attention with one weight for q, k and v, and a gated MLP with one for both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.both, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).reshape(n, t, d))
        gate, up = self.both(x).view(n, t, 2, 16).unbind(2)
        return self.down(torch.tanh(gate) * up)


def fused() -> Program:
    model = Fused()
    return odd_step, model, torch.optim.AdamW(model.parameters(), 1e-2), (torch.randn(4, 5, 8),)


def test_the_state_of_fused_weights_is_that_of_one_device(ranks: Ranks) -> None:
    """Their compute sharding splits each of q, k and v; `full_tensor` has their rows in order."""
    step, model, optimizer, batch = fused()
    made = tutti.distribute(step, model, optimizer, "tensor=2").program_of(batch).plan
    assert str(made.compute["qkv.weight"]) == "3*8@tensor, 8"
    assert str(made.storage["qkv.weight"]) == "24@tensor, 8"
    assert str(made.storage["optim.both.weight.exp_avg"]) == "32@tensor, 8"
    assert_as_eager_on_ranks(ranks, fused, "tensor=2")


class Odd(nn.Module):
    """Parameters that no dim of divides, that only the second dim of does, and that divide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3, 5))
        self.c, self.scale = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a @ self.b @ self.c * self.scale


def odd_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.fixture(scope="module")
def odd() -> Captured:
    torch.manual_seed(0)
    model = Odd()
    return capture(odd_step, model, torch.optim.Adam(model.parameters()), (torch.randn(4, 8),))


def planned(captured: Captured, layout: str) -> ShardingPlan:
    return plan(copied(captured), Layout.parse(layout))


def test_what_divides_nowhere_stays_whole_with_the_reason(odd: Captured) -> None:
    made = planned(odd, "data=2 zero=3")
    stored = {n: str(made.storage[n]) for n in ("a", "b", "c", "scale")}
    assert stored == {"a": "8@data, 3", "b": "3, 5", "c": "5, 2@data", "scale": ""}
    assert made.reasons == {"b": "no dim of [3, 5] divides by data=2"}
    assert made.storage["optim.b.exp_avg"].is_whole


@pytest.mark.parametrize(
    ("zero", "parameter", "slot"), [(0, 0, 0), (1, 0, 1), (2, 0, 1), (3, 1, 1)]
)
def test_levels_of_zero(odd: Captured, zero: int, parameter: int, slot: int) -> None:
    made = planned(odd, f"data=2 zero={zero}" if zero else "data=2")
    assert ("data" in made.storage["a"].axes) == bool(parameter)
    assert ("data" in made.storage["optim.a.exp_avg"].axes) == bool(slot)
    assert made.storage["optim.a.step"].is_whole
    assert all(made.compute[n].is_whole for n in ("a", "b", "c"))


def test_a_weight_has_a_mark_for_each_region_and_a_gradient_one_into_the_update(
    odd: Captured,
) -> None:
    captured = copied(odd)
    found = insert_boundaries(captured)
    regions = sorted((k.parameter, k.into) for k in found.values() if k.parameter)
    # The input x needs no gradient, so the backward never sees `a`.
    assert regions == [
        *[("a", "forward"), ("b", "backward"), ("b", "forward")],
        *[("c", "backward"), ("c", "forward"), ("scale", "backward"), ("scale", "forward")],
    ]
    assert sum(k.into == "update" for k in found.values()) == 4
    for mark, kind in found.items():
        assert {u.meta["region"] for u in mark.users} == {kind.into}


def test_marks_of_one_weight_lie_alike() -> None:
    made = program("gpt", "data=2 tensor=2").plan
    by_name: dict[str, set[str]] = {}
    for mark, kind in made.boundaries.items():
        if kind.parameter:
            by_name.setdefault(kind.parameter, set()).add(str(made.spread.of(mark)))
    assert by_name and all(len(found) == 1 for found in by_name.values())
    assert by_name["blocks.0.up.weight"] == {"128@tensor, 32"}


def test_planning_leaves_the_capture_as_it_was() -> None:
    captured = subject("gpt").captured
    before = [(n.name, n.target) for n in captured.graph.nodes]
    subject("gpt").program(Layout.parse("data=2 zero=3"))
    assert [(n.name, n.target) for n in captured.graph.nodes] == before
