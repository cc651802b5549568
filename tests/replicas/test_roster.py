"""Which weights take part in a round."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tutti.errors import CommError
from tutti.replicas.calls import Calls
from tutti.replicas.labels import check_labels, labelled
from tutti.replicas.member import ReplicaMember
from tutti.replicas.pieces import cut
from tutti.replicas.roster import Roster
from tutti.replicas.strategies import parse
from tutti.replicas.strategy import Round

SHAPES = {"a": (2, 3), "b": (3,)}


def played(roster: Roster, script: str, every: int, text: str = "average()") -> list[list[str]]:
    """The weights of each round; `script` has the trained weights of each step."""
    found = []
    for step, names in enumerate(script.split(), 1):
        shapes = {n: SHAPES[n] for n in names.strip("-")}
        if new := roster.lacks(shapes):
            roster.join(new, step)
        roster.train(shapes, step)
        if step % every == 0:
            due = Round(step, step)
            found.append(roster.part(due, parse(text)))
            roster.meet(due, found[-1])
    return found


def test_a_weight_that_rests_takes_part_once_more() -> None:
    rounds = played(Roster(), "a a ab ab ab b b b ab", every=2)
    assert rounds == [["a"], ["a", "b"], ["a", "b"], ["b"]]
    assert played(Roster(), "a - - - b ab", every=2) == [["a"], [], ["a", "b"]]
    assert played(Roster(), "ab - - - - a", every=3) == [["a", "b"], ["a"]]


def test_a_weight_of_gossip_stays() -> None:
    assert played(Roster(), "ab - - -", every=2, text="gossip()") == [["a", "b"], ["a", "b"]]


def test_after_a_round_of_a_group_replicas_still_differ() -> None:
    roster = Roster()
    roster.join(SHAPES, 1)
    roster.train(SHAPES, 1)
    near, all_of_them = Round(1, 1, group=2), Round(2, 2)
    for due, then in ((near, ["a", "b"]), (all_of_them, [])):
        roster.meet(due, roster.part(due, parse("average()")))
        assert roster.part(due, parse("average()")) == then


def test_later_weights_leave_the_fragments_of_earlier_ones() -> None:
    roster, strategy = Roster(), parse("diloco(every=4, fragments=2)")
    roster.join({"b": (3,), "d": (1,)}, 1)
    roster.join({"a": (2, 3), "c": (1,), "e": (1,)}, 3)
    roster.train("abcde", 3)
    parts = [roster.part(Round(4, 4, fragment=k), strategy) for k in (0, 1)]
    assert parts == [["b", "a", "e"], ["d", "c"]]
    assert roster.generations() == [["b", "d"], ["a", "c", "e"]]


def test_a_weight_of_another_shape_joins_anew() -> None:
    roster = Roster()
    roster.join(SHAPES, 1)
    assert roster.lacks(dict(SHAPES)) == {}
    assert roster.lacks({"a": (2, 4), "b": (3,)}) == {"a": (2, 4)}


def test_a_roster_is_saved() -> None:
    roster = Roster()
    played(roster, "a a ab b", every=3)
    again = Roster.unpacked(roster.packed())
    assert again.__dict__ | {"_seen": None} == roster.__dict__ | {"_seen": None}
    assert list(again._joined) == list(roster._joined)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": ""}, 'the weights that they have trained before the round after step 6: "b"'),
        ({"a": "", "b": "1f"}, '"b" has not begun with the same value on all replicas'),
        ({"b": "", "a": ""}, "another order before the round after step 6"),
    ],
)
def test_messages_about_other_weights_are_refused(other: dict[str, str], said: str) -> None:
    mine = labelled({}, {"a": "", "b": ""})
    check_labels(6, [mine, labelled({}, {"a": "", "b": ""})])
    with pytest.raises(CommError) as caught:
        check_labels(6, [mine, labelled({}, other)])
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["elastic(every=1)", "pairs(every=1)"])
def test_a_call_about_a_weight_that_has_not_joined_has_no_effect_and_is_refused_later(
    text: str,
) -> None:
    """The caller may be some steps ahead; `a` joins there before step 1, and here before step 3."""
    member = ReplicaMember(parse(text), 2)
    calls = Calls(member)
    calls.start(SimpleNamespace(num_replicas=2, replica=1))  # type: ignore[arg-type]
    assert calls.answer(0, "2.0", {"a:0": torch.ones(2)}) == {}
    calls.check(1)
    with pytest.raises(CommError, match='replica 0 has exchanged "a" after step 2'):
        calls.check(2)
    weights = {"a": torch.zeros(2)}
    member.join({"a": (2,)}, weights, 3)
    calls.join(weights)
    calls.check(9)
    assert calls.answer(0, "4.0", {"a:0": torch.ones(1)}).keys() == {"a:0"}


@pytest.mark.parametrize("text", ["elastic(every=1)", "pairs(every=1)"])
def test_a_call_during_a_save_does_not_change_what_is_saved(text: str) -> None:
    member = ReplicaMember(parse(text), 2)
    weights = {"a": torch.zeros(4)}
    member.join({"a": (4,)}, weights, 1)
    saved, kind = member.copy(), parse(text).answers_from
    (pieces,) = cut(weights, 1)
    member.answer(pieces, {"a:0": torch.ones(4)})
    assert member.state[f"{kind}.a"].any() and not saved[f"{kind}.a"].any()
