"""What `explain` says of rounds: when, what, how many bytes, to whom; and that so many bytes are sent."""

from __future__ import annotations

from collections import Counter

import pytest

import replicas_train as training
import tutti
from ranks import Ranks
from tutti.layout import Layout
from tutti.report.explanation import explain
from tutti.report.rounds import exchanges, kept_nbytes, rounds_text

# Of the model: 16 x 8 + 16 + 4 x 16 + 4 numbers.
NUMBERS = 212


def text_of(layout: str) -> str:
    step = tutti.distribute(training.train_step, *training.make(), layout)
    return rounds_text(step.program_of(training.batch_at(0)))


def test_a_line_for_each_kind_of_round() -> None:
    lines = text_of("replica=4 sync=average(every=4, then=16, after=3)").splitlines()
    assert lines[0] == "replicas agree by average(every=4, then=16, after=3)"
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "1 to 3 4 weights mean 2.54 kB the other 3",
        "7, 11, ... 4 weights mean 1.7 kB its group of 2",
        "19, 35, ... 4 weights mean 2.54 kB the other 3",
    ]


def test_fragments_codes_hops_and_calls() -> None:
    compressed = text_of("replica=2 sync=diloco(every=6, fragments=2, delay=2, traffic=int8)")
    assert "6, 12, ..." in compressed and "3, 9, ..." in compressed
    assert "mean in int8, lands 2 steps later" in compressed and "2 weights" in compressed
    hops = text_of("replica=4 sync=gossip(every=1)")
    assert "the replica 1 on" in hops and "the replica 2 on" in hops
    assert "averages with one, without waiting" in text_of("replica=2 sync=pairs(every=3)")
    assert "each" in text_of("replica=2 sync=elastic(every=1)")


def test_explain_shows_them_of_a_step_that_trains() -> None:
    layout = "replica=2 data=2 zero=3 sync=average(every=8)"
    step = tutti.distribute(training.train_step, *training.make(), layout)
    shown = explain(step.program_of(training.batch_at(0)))
    assert "replicas agree by average(every=8)" in shown
    assert "848 B" in shown  # half of the numbers lie on each rank


@pytest.mark.parametrize(
    "sync",
    [
        "average(every=2)",
        "diloco(every=2, fragments=2, traffic=bf16)",
        "diloco(every=2, traffic=int8)",
        "gossip(every=2)",
    ],
)
def test_as_many_bytes_are_sent_as_it_says(ranks: Ranks, sync: str) -> None:
    """Letters have headers of their own, and int8 has a scale for each piece."""
    layout = f"replica=2 sync={sync}"
    found = ranks.run(training.sent_nbytes, layout, 2, 6, n=2)
    step = tutti.distribute(training.train_step, *training.make(), layout)
    program = step.program_of(training.batch_at(0))
    said = 2 * sum(one.nbytes for one in exchanges(program))  # each comes twice in four steps
    for sent, num_letters in found:
        assert said < sent < said + 500 * num_letters


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("replica=2 sync=average(every=2)", {}),
        ("replica=2 sync=average(every=2, traffic=int8)", {"anchor": 1, "error": 1}),
        ("replica=2 sync=diloco(every=2, fragments=2)", {"anchor": 1, "momentum": 1}),
        ("replica=2 data=2 zero=3 sync=pairs(every=1)", {"shared": 0.5, "base": 0.5}),
        ("replica=2 data=2 zero=1 sync=elastic(every=1)", {"centre": 1}),
    ],
)
def test_the_state_of_a_strategy_is_told_and_as_large_in_a_run(
    ranks: Ranks, layout: str, kinds: dict[str, float]
) -> None:
    found = ranks.run(kept_and_held, layout, n=Layout.parse(layout).num_ranks)
    expected = {kind: int(8 * NUMBERS * share) for kind, share in kinds.items()}
    assert all(told == held == expected for told, held in found)
    assert ("a rank also keeps" in text_of(layout)) == bool(kinds)


def kept_and_held(layout: str) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of a strategy's state by kind: predicted, and held by this rank."""
    step = tutti.distribute(training.train_step, *training.make(), layout)
    training.run(step, 0, 3)
    assert step.agreeing is not None and step.agreeing.team is not None
    held: Counter[str] = Counter()
    for name, x in step.agreeing.team.member.state.items():
        held[name.partition(".")[0]] += x.nbytes
    return kept_nbytes(step.program), dict(held)
