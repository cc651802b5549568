"""A rule that is wrong must be caught: the brute force finds each fault that is put in on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from brute_force import MODE, check
from tutti.rules import Rule, rule_of
from tutti.rules.rule import groups
from tutti.rules.samples.sample import Sample, f, flags, ints, positive, sample, some

Break = Callable[[Rule], Rule]


class _NothingReduced(Rule):
    """Takes the sum over a split factor for done."""

    def reduced(self, result: int) -> set[str]:
        del result
        return set()


def no_reduction(rule: Rule) -> Rule:
    return _NothingReduced(**rule.__dict__)


def nothing_whole(rule: Rule) -> Rule:
    return replace(rule, whole=frozenset())


def no_parts(rule: Rule) -> Rule:
    return replace(rule, parts={})


def no_shape(rule: Rule) -> Rule:
    return replace(rule, shape_argument=None)


def linear_in(*members: tuple[int, ...]) -> Break:
    return lambda rule: replace(rule, linear=groups(*members))


def reduced_by(op: str) -> Break:
    return lambda rule: replace(rule, reduce=op)


def structural(rule: Rule) -> Rule:
    return replace(rule, structural=True)


_NLL = (f(12, 8), some(8, -100, 12), None)
_SUM_OF_LINES = sample("sum.dim_IntList", f(4, 6), [1])


def local_mean(rule: Rule | None) -> Rule | None:
    """A mean taken for a sum: each rank divides by its own count."""
    assert rule is None
    return rule_of(_SUM_OF_LINES.node(MODE))


FAULTS: list[tuple[Sample, Break]] = [
    (sample("mm", f(12, 8), f(8, 6)), no_reduction),
    (sample("mm", f(12, 8), f(8, 6)), linear_in((0, 1))),
    (sample("mm", f(12, 8), f(8, 6)), reduced_by("max")),
    (sample("addmm", f(6), f(12, 8), f(8, 6)), nothing_whole),
    (sample("_softmax", f(4, 6), -1, False), nothing_whole),
    (sample("_softmax", f(4, 6), -1, False), linear_in((0,))),
    (sample("mean.dim", f(4, 6), [1]), local_mean),
    (sample("mse_loss", f(4, 6), f(4, 6)), no_parts),
    (sample("mse_loss_backward", f(), f(4, 6), f(4, 6), 1), no_parts),
    (sample("amax", f(4, 6), [1]), reduced_by("sum")),
    (sample("cumsum", f(4, 6), 1), nothing_whole),
    (sample("sort", f(4, 6), 1), nothing_whole),
    (sample("embedding", f(12, 6), ints(12, 4)), no_parts),
    (sample("embedding_dense_backward", f(4, 6), ints(12, 4), 12, -1, False), no_parts),
    (sample("nll_loss_forward", *_NLL, 2, -100), no_parts),
    (sample("reshape", f(4, 6, 12), [24, 12]), no_shape),
    (sample("expand", f(4, 1), [4, 6]), no_shape),
    (sample("exp", f(4, 6)), linear_in((0,))),
    (sample("add.Tensor", f(4, 6), f(4, 6)), linear_in((0,))),
    (sample("add.Tensor", f(4, 6), 0.5), linear_in((0,))),
    (sample("where.self", flags(4, 6), f(4, 6), f(4, 6)), linear_in((1,))),
    (sample("neg", f(4, 6)), structural),
    (sample("native_layer_norm", f(4, 12), [12], f(12), f(12), 1e-5), nothing_whole),
    (sample("native_batch_norm", f(4, 6, 3), f(6), f(6), f(6), positive(6), True, 0.1, 1e-5),
     nothing_whole),
]  # fmt: skip


@pytest.mark.parametrize(("call", "broken"), FAULTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_brute_force_catches_a_broken_rule(call: Sample, broken: Any) -> None:
    rule = broken(rule_of(call.node(MODE)))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(call, rule)
