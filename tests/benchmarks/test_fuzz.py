"""Random steps, each the same in every way to run it or refused by name; the fuzzer's own parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import fuzz_steps
from benchmarks.fuzz.check import Work, built, checked, locally, on_rank
from benchmarks.fuzz.numbers import HOLDERS, Piece
from benchmarks.fuzz.optimizers import PLAIN as OPTIMIZERS
from benchmarks.fuzz.source import Drawn, draw, source
from benchmarks.fuzz_steps import failures, shrunk, work_of
from benchmarks.programs.play import Cell, compared, eager, nudged
from ranks import Ranks

PLAIN = Drawn(0, "function", "tuple", "one", ("SGD", "SGD"), "loss", ())
# The fewest programs found that together have all that a program may have: test_the_seeds_have_every_part.
SEEDS = (
    92, 926, 1049, 1291, 1791, 2077, 2787, 3176, 3999, 4114, 4116, 4428, 4482, 5424, 5537, 5708, 6039,
    6179, 6211, 6569, 7185, 8930, 9667, 9971, 10185, 11095, 11457, 12343, 12904, 14486, 15256, 15477,
    15540, 15648, 16243, 17230, 17866, 18352, 18608, 19157, 19890,
)  # fmt: skip
# These run on real ranks as well: what they add to one device and virtual ranks is the rest.
ON_RANKS = (3999, 5424, 5708, 7185, 15540, 19157)


def one_layout(seed: int) -> Work:
    """The program of a seed, verified under one layout of the four."""
    work = work_of(draw(seed))
    return replace(work, verified=work.verified[seed % 2 :][:1])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_step_is_the_same_or_refused(seed: int, no_default_dtype: None) -> None:
    ((wanted, _, cells),) = locally([one_layout(seed)])
    assert isinstance(wanted, dict), wanted
    assert not {c: str(cell) for c, cell in cells.items() if cell.bad}, draw(seed).name


@pytest.mark.parametrize("seed", ON_RANKS)
def test_a_random_step_on_real_ranks(seed: int, ranks: Ranks, no_default_dtype: None) -> None:
    work = work_of(draw(seed))
    wanted, nudge = eager(built(work)), nudged(built(work))
    for (found,) in ranks.run(traces_on_rank, [work], n=2):
        for trace in found:
            assert not (cell := compared(trace, wanted, nudge)).bad, f"{cell}\n{draw(seed).name}"


def parts(seed: int) -> set[tuple[Any, ...]]:
    """What its program has: structure, optimizers, habits, holders and uses of numbers; its layout."""
    d = draw(seed)
    (layout,) = one_layout(seed).verified
    kinds = d.kinds if d.many != "one" else d.kinds[:1]
    found: set[tuple[Any, ...]] = {("form", d.form), ("length", len(d.pieces))}
    found |= {("kind", kind) for kind in kinds} | {("kind of", d.many, d.kinds[0] in OPTIMIZERS)}
    for structure in (("batch", d.batch), ("many", d.many), ("returned", d.returned)):
        found |= {structure, (layout, *structure) if d.batch != "dict" else structure}
    for piece in d.pieces:
        number, _, rest = piece.name.partition(" in ")
        found |= (
            {(number, i, word) for i, word in enumerate(rest.split(", "))}
            if number in ("counter", "float")
            else {("habit", piece.name)}
        )
    return found


def parts_on_ranks(seed: int) -> set[tuple[Any, ...]]:
    """The same of its run on real ranks, without habits."""
    d, (layout,) = draw(seed), work_of(draw(seed)).ranks
    structure = ("form", d.form), ("returned", d.returned), ("batch", d.batch)
    return {*structure, (layout, "many", d.many)}


def test_the_seeds_have_every_part() -> None:
    many = range(1000)
    missing = set().union(*map(parts, many)) - set().union(*map(parts, SEEDS))
    assert not missing
    assert set(ON_RANKS) <= set(SEEDS)
    on_ranks = set().union(*map(parts_on_ranks, ON_RANKS))
    assert not set().union(*map(parts_on_ranks, many)) - on_ranks


def traces_on_rank(works: list[Work]) -> list[Any]:
    """What a rank finds, and its default dtype as it was."""
    import torch

    before = torch.get_default_dtype()
    try:
        return list(on_rank(works))
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def no_default_dtype() -> Iterator[None]:
    """Programs set float64; other tests of this process want what was before."""
    import torch

    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_a_seed_is_one_program() -> None:
    assert source(draw(5)) == source(draw(5)) != source(draw(6))


@pytest.mark.parametrize("where", HOLDERS)
def test_a_number_lives_where_it_is_said_to(where: str, no_default_dtype: None) -> None:
    """As PyTorch runs it: counted up at each of four calls, and seen by what comes in between."""
    holder = HOLDERS[where]("k0", "0")
    counting = {"tail": [f"{holder.read} += 1"], "between": [f'told["k"] = {holder.read}']}
    lines = {
        at: [*holder.lines.get(at, []), *counting.get(at, [])] for at in {*holder.lines, *counting}
    }
    found = eager(built(Work("0", source(replace(PLAIN, pieces=(Piece("count", lines),))))))
    assert [int(found[f"after call {i}.k"]) for i in range(4)] == [1, 2, 3, 4]


def test_a_frozen_number_shows(no_default_dtype: None) -> None:
    """What one device would be told if a counter stayed at zero is not the same."""
    counts = Piece(
        "", {"setup": ["k0 = [0]"], "loss": ["loss = loss * (1 + k0[0])"], "tail": ["k0[0] += 1"]}
    )
    frozen = Piece("", {"setup": ["k0 = [0]"], "loss": ["loss = loss * (1 + k0[0])"]})
    both = [eager(built(Work("0", source(replace(PLAIN, pieces=(p,)))))) for p in (counts, frozen)]
    assert compared(both[1], both[0]).kind == "WRONG"


def test_a_program_that_hangs_or_ends_costs_itself_alone() -> None:
    """Only the one that hangs has little time: a busy machine may take long for the others."""
    ends = Piece("", {"head": ["os._exit(3)"]})
    hangs = Piece("", {"head": ["time.sleep(60)"]})
    works = [
        Work(str(i), source(replace(PLAIN, pieces=pieces)), verified=())
        for i, pieces in enumerate([(ends,), (), (hangs,), ()])
    ]
    works[2] = replace(works[2], seconds=2.0)
    found = [next(iter(cells.values())) for _, cells in checked(works, ranks=False)]
    assert [cell.kind for cell in found] == ["RAW", "same", "RAW", "same"]
    assert "the process ended with 3" in str(found[0])
    assert "no answer within 2 s" in str(found[2])


def test_shrinking_leaves_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, fine = Piece("bad", {"loss": ["pass  # bad"]}), Piece("fine", {"loss": ["pass"]})

    def check(works: list[Work], *, ranks: bool) -> Iterator[tuple[Work, dict[str, Cell]]]:
        for work in works:
            yield work, {"one": Cell("WRONG" if "# bad" in work.text else "same")}

    monkeypatch.setattr(fuzz_steps, "checked", check)
    start = replace(PLAIN, pieces=(fine, bad, fine), form="method", kinds=("Adam", "SGD"))
    assert shrunk(start, ["one"]) == replace(PLAIN, pieces=(bad,))


def test_failures_are_what_is_wrong_raw_or_broken() -> None:
    cells = {k: Cell(k) for k in ("same", "refused", "WRONG", "RAW", "n/a", "broken")}
    assert failures(cells) == ["WRONG", "RAW", "broken"]
