"""The user's word: patterns that place weights, and what is refused with the nearest that works."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from small_steps import squares, trained
from subjects import program, subject
from tutti.capture.captured import copied
from tutti.errors import ShardingError
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.propagate.plan import plan
from tutti.user_lines import is_users
from tutti.verification.verdict import Subject

# Layout, placement, and the whole message.
REFUSED = {
    "no such parameter": (
        "tensor=2",
        {"*.up.wieght": "tensor, -"},
        """place: no parameter and no module's output matches "*.up.wieght"
  why  the model has 37 parameters: embed.weight, pos.weight, blocks.0.norm1.weight, blocks.0.norm1.bias, ...
  fix  the nearest names are pos.weight, blocks.1.up.weight, blocks.0.up.weight""",
    ),
    "does not divide": (
        "tensor=5",
        {"pos.weight": "-, tensor"},
        """cannot split dim 1 (size 32) over tensor (size 5)
  at   place["pos.weight"] for pos.weight
  why  the sharding "-, tensor" of a tensor of shape [16, 32]
  fix  a size that 5 divides, or '-' for this dim""",
    ),
    "two axes do not divide": (
        "data=2 tensor=8 expert=4",
        {"pos.weight": "tensor+expert, -"},
        """cannot split dim 0 (size 16) over tensor+expert (size 32)
  at   place["pos.weight"] for pos.weight
  why  the sharding "tensor+expert, -" of a tensor of shape [16, 32]
  fix  a size that 32 divides, or '-' for this dim""",
    ),
    "number of dims": (
        "tensor=2",
        {"*.up.weight": "tensor"},
        """"tensor" has 1 entries for a tensor of 2 dims
  at   place["*.up.weight"] for blocks.0.up.weight
  why  the shape is [128, 32]; a sharding has one entry per dim
  fix  an axis name, "a+b" for several, or "-" for a dim that stays whole""",
    ),
    "unknown axis": (
        "tensor=2",
        {"*.up.weight": "tensr, -"},
        """unknown axis "tensr" in "tensr, -"
  at   place["*.up.weight"] for blocks.0.up.weight
  fix  axes are data, tensor, seq, expert""",
    ),
}


def placed(layout: str, place: dict[str, str]) -> Program:
    return subject("gpt").program(Layout.parse(layout), place)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    layout, place, message = REFUSED[name]
    with pytest.raises(ShardingError) as caught:
        placed(layout, place)
    assert str(caught.value) == message


def test_a_batch_that_does_not_divide() -> None:
    """Every rank works it out whole, and that is said."""
    with pytest.warns(
        UserWarning, match="the 8 samples of batch tensor 0 do not divide by data=3"
    ) as heard:
        made = placed("data=3 zero=1", {})
    assert is_users(heard[0].filename)
    batch = [n for n, kind in made.captured.kinds.items() if kind == "batch"]
    assert batch and not any(
        "data" in made.plan.spread.of(made.captured.placeholder(n)).axes for n in batch
    )


def test_axes_that_the_layout_lacks_are_ignored() -> None:
    made = placed("data=2", {"*.up.weight": "tensor, -"})
    assert made.plan.compute["blocks.0.up.weight"].is_whole


def test_the_first_pattern_that_matches_counts() -> None:
    made = placed("tensor=2", {"blocks.0.up.weight": "-, tensor", "*.up.weight": "tensor, -"})
    assert str(made.storage["blocks.0.up.weight"]) == "128, 32@tensor"
    assert str(made.storage["blocks.1.up.weight"]) == "128@tensor, 32"


def test_what_is_placed_spreads_to_what_must_lie_alike() -> None:
    """A bias, the next weight's rows and the slots follow the placed weight; norms stay whole."""
    made = placed("tensor=2", {"*.up.weight": "tensor, -"})
    found = {n: str(s) for n, s in made.plan.compute.items() if n.startswith("blocks.0")}
    assert found["blocks.0.up.bias"] == "128@tensor"
    assert found["blocks.0.down.weight"] == "32, 128@tensor"
    assert found["blocks.0.down.bias"] == "32" and found["blocks.0.norm2.weight"] == "32"
    assert str(made.storage["optim.blocks.0.down.weight.exp_avg"]) == "32, 128@tensor"
    assert str(made.storage["optim.blocks.0.down.weight.step"]) == ""


def test_an_axis_keeps_where_it_came_from() -> None:
    """Follow `origin` from the second weight back to the word that was given."""
    made = placed("tensor=2", {"*.up.weight": "tensor, -"})
    plan = made.plan
    marks = {k.parameter: m for m, k in plan.boundaries.items() if k.parameter}
    at = plan.spread.alias.get(marks["blocks.0.down.weight"], marks["blocks.0.down.weight"])
    via = plan.spread.origin[at, "tensor"]
    assert not isinstance(via, str) and via.meta["module"] == "blocks.0.down"
    words = {w for (_, a), w in plan.spread.origin.items() if a == "tensor" and isinstance(w, str)}
    assert 'place "*.up.weight"' in words
    # Every axis that is wanted anywhere has an origin.
    for node, sharding in plan.spread.wanted.items():
        assert all((node, axis) in plan.spread.origin for axis in sharding.axes), node


def test_the_batch_is_split_over_data_and_its_sequence_over_seq() -> None:
    spread = program("gpt", "data=2 seq=2").plan.spread
    captured = program("gpt", "data=2 seq=2").captured
    for name in ("batch.0", "batch.1"):
        node = captured.placeholder(name)
        assert str(spread.of(node)) == "8@data, 16@seq"
        assert spread.origin[node, "data"] == "the layout splits the batch"


@pytest.mark.parametrize(("name", "wanted"), [("sgd", "8@data, 16"), ("vit", "8@data, 3, 16, 16")])
def test_what_looks_like_no_sequence_is_not_split_over_seq(name: str, wanted: str) -> None:
    with pytest.warns(UserWarning, match="seq=2 splits nothing of this step"):
        made = subject(name).program(Layout.parse("data=2 seq=2"))
    assert str(made.plan.spread.of(made.captured.placeholder("batch.0"))) == wanted
    assert made.plan.reasons.get("batch.0") is None


def test_a_sequence_that_does_not_divide_stays_whole_with_the_reason() -> None:
    with pytest.warns(UserWarning, match="seq=3 splits nothing of this step"):
        made = placed("seq=3", {})
    node = made.captured.placeholder("batch.0")
    assert made.plan.reasons["batch.0"] == "its sequence of 16 does not divide by seq"
    assert str(made.plan.spread.of(node)) == "8, 16"
    assert made.collectives == []


def test_compute_shardings_that_are_known_stay() -> None:
    """A second signature of the same model keeps what the first has settled."""
    first = placed("tensor=2", {"*.up.weight": "tensor, -"}).plan
    known = {"blocks.0.up.weight": first.compute["blocks.0.up.weight"]}
    again = plan(copied(subject("gpt").captured), Layout.parse("tensor=2"), {}, known=known)
    assert again.compute["blocks.0.up.weight"] == known["blocks.0.up.weight"]
    assert again.compute["blocks.0.down.weight"] == first.compute["blocks.0.down.weight"]
    assert again.compute["blocks.1.up.weight"].is_whole


class Tied(nn.Module):
    """The head reads the table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def tied(place: dict[str, str]) -> Program:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randint(12, (8, 6)),)
    return Subject(trained(squares), model, optimizer, batch).program(Layout.parse(TIED), place)


TIED = "tensor=2"


@pytest.mark.parametrize("pattern", ["table.weight", "head.weight", "*head*"])
def test_a_tied_weight_is_placed_by_any_name(pattern: str) -> None:
    assert str(tied({pattern: "tensor, -"}).plan.compute["table.weight"]) == "12@tensor, 4"


def test_a_tied_weight_has_one_sharding() -> None:
    tied({"head.weight": "tensor, -", "table.weight": "tensor, -"})
    for place in (
        {"table.weight": "tensor, -", "head.weight": "-, tensor"},
        {"*le.weight": "tensor, -", "head.*": "-, -"},
    ):
        with pytest.raises(ShardingError, match=r'"head\.weight" is tied to "table\.weight"'):
            tied(place)


@pytest.mark.parametrize("groups", [2, 4, 8], ids=lambda n: f"{n} groups")
def test_a_group_norm_is_split_by_groups(groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.GroupNorm(groups, 8), nn.SiLU(), nn.Conv2d(8, 4, 3)
    ).double()
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 4, 6, 6).double()
    layout, whole = Layout.parse("data=2 tensor=2"), {"1.*": "tensor"}
    built = Subject(trained(squares), model, optimizer, (x,))
    found = built.program(layout, whole)
    assert found.fallbacks == []
    verdict = built.verdict(layout, program=found)
    assert verdict.ok, str(verdict)


def test_a_group_norm_is_not_split_within_a_group() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(1, 8))
    built = Subject(
        trained(squares), model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(4, 4),)
    )
    with pytest.raises(ShardingError, match=r'native_group_norm cannot take "1\.weight" split'):
        built.program(Layout.parse("tensor=2"), {"1.weight": "tensor"})
