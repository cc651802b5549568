"""Every rule, by brute force: each factor on each axis, played on virtual ranks against one device."""

from __future__ import annotations

import pytest

from brute_force import MODE, check
from tutti.rules import TABLE, rule_of
from tutti.rules.families.pointwise import LINEAR, UNTAGGED
from tutti.rules.samples.gpu_samples import GPU
from tutti.rules.samples.op_samples import FAMILIES
from tutti.rules.samples.pointwise_samples import pointwise_ops, pointwise_samples
from tutti.rules.samples.sample import Sample

TABLED = [call for calls in FAMILIES.values() for call in calls]
# Ops whose every dim stays whole: there is one way to play them.
NOTHING_SPLIT = {"arange", "linspace", "eye", "median"}


@pytest.mark.parametrize("call", TABLED, ids=str)
def test_every_way_to_split_an_op_gives_the_values_of_one_device(call: Sample) -> None:
    assert check(call) >= 1


def test_most_samples_can_be_split() -> None:
    whole = [c for c in TABLED if not any(f not in r.whole for r in [rule_of(c.node(MODE))] if r
                                          for f in r.factors)]  # fmt: skip
    names = {str(c.op).split(".")[1] for c in whole}
    assert len(whole) < len(TABLED) // 10, names


def test_every_way_to_split_an_element_by_element_op() -> None:
    calls = list(pointwise_samples(MODE))
    assert {c.op for c in calls} == set(pointwise_ops())
    assert sum(check(call, thorough=False) for call in calls) > 5 * len(calls)


def test_every_op_of_the_tables_has_a_sample() -> None:
    sampled = {c.op for c in (*TABLED, *GPU)}
    assert sorted(str(op) for op in set(TABLE) - sampled) == []
    assert sorted(str(op) for op in (set(LINEAR) | UNTAGGED) - set(pointwise_ops())) == []


def test_special_parts_are_played() -> None:
    """A part belongs to a factor that may be split, so the samples above do play it."""
    for call in TABLED:
        rule = rule_of(call.node(MODE))
        assert rule is not None
        for factor in rule.parts:
            assert factor in rule.factors and factor not in rule.whole, call
