"""Rule text bound to shapes, and rules for a user's own ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from brute_force import MODE, check
from tutti.errors import TuttiError
from tutti.rules import TABLE, add_rule, rule_of
from tutti.rules import table as table_module
from tutti.rules.rule import parse_rule
from tutti.rules.samples.sample import Sample, f


def test_text_and_shapes_make_a_rule() -> None:
    rule = parse_rule("m k, n k! -> m n", [(4, 8), (6, 8)], [(4, 6)])
    assert str(rule) == "m k!, n k! -> m n"
    assert rule.sizes == {"m": 4, "k": 8, "n": 6}
    assert rule.whole == {"k"} and rule.reduced(0) == {"k"}


def test_a_product_of_factors_takes_the_size_that_is_left() -> None:
    rule = parse_rule("(h d), h -> h d", [(24,), (4,)], [(4, 6)], sizes={"h": 4})
    assert rule.sizes == {"h": 4, "d": 6}
    assert rule.operands[0] == (("h", "d"),)


def test_leading_dims_and_broadcast_dims() -> None:
    rule = parse_rule("... d, ... d -> ...", [(2, 3, 8), (3, 1)], [(2, 3)])
    assert rule.operands == ((("_0",), ("_1",), ("d",)), (("_1",), ()))
    assert rule.results == ((("_0",), ("_1",)),)


def test_a_question_mark_is_a_tensor_that_stays_whole() -> None:
    rule = parse_rule("m, ? -> m", [(4,), (3, 5)], [(4,)])
    assert rule.operands[1] == ((), ())


@pytest.mark.parametrize(
    ("text", "operands", "results", "reason"),
    [
        ("m k, k n", [(2, 3), (3, 4)], [(2, 4)], 'no "->"'),
        ("m k -> m", [(2, 3), (3, 4)], [(2,)], "1 operands"),
        ("m k -> m, k", [(2, 3)], [(2,)], "2 results"),
        ("m k -> m", [(2, 3, 4)], [(2,)], "has not 2 dims"),
        ("m k, k -> m", [(2, 3), (4,)], [(2,)], "does not fit"),
        ("(h d) -> h d", [(24,)], [(4, 6)], "not known"),
    ],
)
def test_text_that_does_not_fit_says_why(text: str, operands, results, reason: str) -> None:
    with pytest.raises(ValueError, match="rule") as caught:
        parse_rule(text, operands, results)
    assert reason in str(caught.value)


def test_a_rule_for_an_own_op_is_used_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_OWN", {})
    with torch.library._scoped_library("tutti_test_rules", "FRAGMENT") as library:
        library.define("scaled_product(Tensor a, Tensor b) -> Tensor")
        library.impl("scaled_product", lambda a, b: 2 * (a @ b.mT), "CompositeExplicitAutograd")
        op = torch.ops.tutti_test_rules.scaled_product.default
        call = Sample(op, (f(12, 8), f(6, 8)))
        assert rule_of(call.node(MODE)) is None
        add_rule("tutti_test_rules::scaled_product", "m k, n k -> m n")
        assert str(rule_of(call.node(MODE))) == "m k, n k -> m n"
        assert check(call) > 10


@pytest.mark.parametrize(
    ("op", "text", "what"),
    [
        ("foo", "m -> m", "there is no op 'foo'"),
        ("tutti_test_rules::missing", "m -> m", "there is no op 'tutti_test_rules::missing' yet"),
        (None, None, "there is no op None"),
        ("aten::relu", None, "None is no rule of aten::relu"),
        ("aten::relu", "m", "'m' is no rule of aten::relu"),
    ],
)
def test_what_is_no_rule_is_refused(op: Any, text: Any, what: str) -> None:
    with pytest.raises(TuttiError, match=what):
        add_rule(op, text)


def test_rules_are_for_exact_overloads() -> None:
    assert all(isinstance(op, torch._ops.OpOverload) for op in TABLE)
