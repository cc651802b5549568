"""The layouts that a plan compares, against brute force."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest

from tutti.errors import LayoutError, PlanError
from tutti.layout import Layout
from tutti.planner.search.layout_choices import Space, doubled_divisors

SIZES = (1, 2, 3, 4, 6, 8, 12)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 6, 12])
def test_axes_are_all_products(num_ranks: int) -> None:
    found = {
        tuple(layout.axes.get(a, 1) for a in ("data", "tensor", "pipe"))
        for layout in Space(num_ranks, 48).layouts()
    }
    wanted = {
        sizes
        for sizes in product(SIZES, repeat=3)
        if sizes[0] * sizes[1] * sizes[2] == num_ranks and 48 % sizes[0] == 0
    }
    # A pipeline needs a number of micro-batches that divides the rows of a data rank.
    assert found == {s for s in wanted if s[2] == 1 or _has_micro(48 // s[0], s[2])}


def _has_micro(rows: int, pipe: int) -> bool:
    return any(pipe <= m <= 8 * pipe for m in doubled_divisors(rows))


@pytest.mark.parametrize("number", range(1, 200))
def test_divisors_double_up_to_the_number(number: int) -> None:
    found = doubled_divisors(number)
    assert found[0] == 1 and found[-1] == number
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    for one, following in pairwise(found):
        assert following == min(d for d in divisors if d >= 2 * one)


def test_the_largest_number_of_micro_batches_has_one_row_each() -> None:
    """60 rows are no power of two: 4 micro-batches of 15 rows are not the least memory."""
    micros = {x.micro for x in Space(4, 240, ("data",)).layouts()}
    assert micros == {1, 2, 4, 10, 20, 60}


def test_micro_batches_of_experts_have_a_row_for_each_rank() -> None:
    """120 rows of a data rank in 8 or 20 micro-batches would not divide by 8 ranks of `expert`."""
    made = Space(16, 240, ("data", "expert"), "data=2").layouts()
    assert {x.micro for x in made if x.axes.get("expert") == 8} == {1, 3, 15}


@pytest.mark.parametrize(
    "given", ["", "zero=1", "micro=2 precision=bf16", "pipe=2", "remat=full data=2"]
)
def test_every_layout_is_valid_and_keeps_the_given_words(given: str) -> None:
    layouts = Space(4, 16, given=given).layouts()
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        parsed = Layout.parse(str(layout))
        parsed.check_available()
        assert parsed == layout
        assert set(given.split()) <= set(str(layout).split())
        assert layout.num_ranks == 4


def test_one_device_has_layouts_too() -> None:
    assert {str(x) for x in Space(1, 2, ()).layouts()} == {
        "",
        "micro=2",
        "remat=full",
        "micro=2 remat=full",
    }


def test_the_largest_sizes_hold() -> None:
    assert all(x.axes.get("tensor", 1) <= 2 for x in Space(8, 8, most=(("tensor", 2),)).layouts())


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (Space(4, 3, ("data",)), "no layout divides 3 samples over 4 devices"),
        (Space(4, 8, given="data=3"), "does not divide 4 devices"),
    ],
)
def test_what_does_not_divide_is_refused(space: Space, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        space.layouts()


@pytest.mark.parametrize(
    "given", ["zero=1 data=2 zero=3", "schedule=gpipe schedule=zb", "data=2 data=2"]
)
def test_a_word_that_appears_twice_is_refused(given: str) -> None:
    with pytest.raises(LayoutError, match="appears twice"):
        Space(2, 8, given=given).layouts()


def test_words_that_do_not_exist_are_refused() -> None:
    with pytest.raises(LayoutError, match="unknown word"):
        Space(4, 8, given="dat=2").layouts()


INNER = ("data", "pipe", "tensor", "seq", "expert")


def _folded(layout: Layout) -> Layout:
    """`seq` given to `data`."""
    axes = dict(layout.axes)
    axes["data"] = axes.get("data", 1) * axes.pop("seq", 1)
    return Layout(axes={a: n for a, n in axes.items() if n > 1}, micro=layout.micro)


@pytest.mark.parametrize(("num_ranks", "rows"), [(4, 2), (8, 4), (8, 8), (4, 16)])
def test_seq_is_there_where_data_cannot_be_larger(num_ranks: int, rows: int) -> None:
    """Layouts with `seq` are left out if there is one with a larger `data` instead, and no others."""
    every = Space(num_ranks, rows, ("data", "pipe", "seq")).layouts()
    kept = Space(num_ranks, rows, ("data", "pipe", "seq"), below_sample=False).layouts()
    without = Space(num_ranks, rows, ("data", "pipe")).layouts() if rows >= num_ranks else []
    splits = {tuple(sorted(x.axes.items())) for x in without}
    assert set(without) <= set(kept) <= set(every)
    for layout in (x for x in every if "seq" in x.axes):
        is_folded = tuple(sorted(_folded(layout).axes.items())) in splits
        if rows >= num_ranks:
            assert (layout not in kept) == is_folded
        below = rows // (layout.axes.get("data", 1) * layout.micro) < layout.axes["seq"]
        assert layout in kept or below


def test_a_given_seq_is_kept() -> None:
    found = Space(4, 16, ("data", "seq"), given="seq=2", below_sample=False).layouts()
    assert found and all(x.axes["seq"] == 2 for x in found)


@pytest.mark.parametrize("axis", ["seq", "expert"])
def test_state_is_split_over_other_axes_of_the_batch(axis: str) -> None:
    found = Space(4, 16, ("data", axis), given=f"{axis}=4", below_sample=False).layouts()
    assert {x.zero for x in found if x.micro == 1} == {0, 1, 3}


def test_axes_within_layers_stay_within_a_host() -> None:
    found = Space(16, 16, INNER, inner=4).layouts()
    inner = [math.prod(x.axes.get(a, 1) for a in ("tensor", "seq", "expert")) for x in found]
    assert max(inner) == 4
    assert any({"expert", "tensor"} <= set(x.axes) for x in found)
    alone = Space(16, 16, INNER, inner=4, expert_and_tensor=False).layouts()
    assert {x for x in found if not {"expert", "tensor"} <= set(x.axes)} == set(alone)
