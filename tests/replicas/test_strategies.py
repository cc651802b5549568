"""The text of strategies: what parses back, what is refused and with which advice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tutti
from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.replicas.average import Average
from tutti.replicas.diloco import DiLoCo
from tutti.replicas.elastic import Elastic
from tutti.replicas.gossip import Gossip
from tutti.replicas.pairs import Pairs
from tutti.replicas.strategies import STRATEGIES, parse
from tutti.replicas.strategy import Strategy

TRAFFIC = st.sampled_from(["fp32", "bf16", "int8"])
NUMBER = st.floats(0, 10, allow_nan=False)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    every = draw(st.integers(1, 1000))
    match draw(st.sampled_from(sorted(STRATEGIES))):
        case "average":
            then = draw(st.sampled_from([0, 2, 5])) * every
            return Average(
                every=every,
                then=then,
                group=draw(st.integers(2, 8)) if then else 2,
                after=draw(st.integers(0, 100)),
                traffic="fp32" if then else draw(TRAFFIC),
            )
        case "gossip":
            return Gossip(every=every, delay=draw(st.integers(0, 5)))
        case "pairs":
            return Pairs(every=every)
        case "elastic":
            return Elastic(every=every, beta=draw(st.floats(0.001, 1)))
        case name:
            assert name == "diloco"
            return DiLoCo(
                every=every,
                lr=draw(NUMBER),
                momentum=draw(st.floats(0, 0.999)),
                fragments=draw(st.integers(1, every)),
                delay=draw(st.integers(0, every - 1)),
                alpha=draw(st.floats(0, 0.999)),
                after=draw(st.integers(0, 100)),
                traffic=draw(TRAFFIC),
            )


@given(strategies())
def test_text_parses_back(strategy: Strategy) -> None:
    assert parse(str(strategy)) == strategy
    layout = Layout.parse(f"data=2 replica=2 sync={strategy} zero=1")
    assert parse(layout.sync) == strategy and layout.zero == 1
    assert Layout.parse(str(layout)) == layout


@given(strategies(), st.randoms())
def test_options_stand_in_any_order_and_with_any_blanks(strategy: Strategy, random) -> None:
    name, _, rest = str(strategy).removesuffix(")").partition("(")
    words = [word.strip() for word in rest.split(",")]
    random.shuffle(words)
    blank = " " * random.randrange(3)
    assert parse(f"{name}({blank}{f'{blank},{blank}'.join(words)}{blank})") == strategy


def test_what_is_not_said_has_its_default() -> None:
    assert parse("average") == parse("average()") == Average(every=16)
    assert parse("diloco") == DiLoCo(every=50, lr=0.7, momentum=0.9)
    assert str(parse("diloco(lr=0.7, momentum=0.9)")) == "diloco(every=50)"


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("averge(every=4)", "sync=averge is unknown", "did you mean average?"),
        ("xyz", "sync=xyz is unknown", "sync=average(every=16)"),
        ("average(evry=4)", '"evry" is no option', "did you mean every?"),
        ("diloco(momnt=4)", '"momnt" is no option', "did you mean momentum?"),
        ("diloco(q=4)", '"q" is no option', "diloco(every=50)"),
        ("average(every=two)", "is not a whole number", "every=16"),
        ("average(every)", "is not a whole number", "every=16"),
        ("average(every=1.5)", "is not a whole number", "every=16"),
        ("diloco(lr=fast)", "is not a number", "lr=0.7"),
        ("diloco(lr=nan)", "below 0", "lr=0 or more"),
        ("diloco(lr=inf)", "lr=inf is not finite", "lr=0.7"),
        ("diloco(momentum=1.5)", "momentum=1.5 is not below 1", "momentum=0.9"),
        (
            "average(every=4, group=4)",
            "group=4 in sync=average(every=4, group=4) has no",
            "then=16",
        ),
        ("gossip(traffic=int8)", "traffic is one of average and diloco", "gossip(every=1)"),
        ("average(every=2, every=3)", '"every" appears twice', "keep one"),
        ("average(every=0)", "every=0 is below 1", "every=1"),
        ("average(every=4, then=6)", "no multiple", "then=16"),
        ("average(every=4, then=4)", "no multiple", "then=16"),
        ("average(every=4, then=8, traffic=int8)", "cannot go with", "leave one"),
        ("average(traffic=fp16)", "traffic=fp16", "fp32, bf16, int8"),
        ("diloco(every=4, delay=4)", "reaches the next exchange", "delay=3"),
        ("diloco(every=4, fragments=5)", "more than every=4", "fragments=4"),
        ("diloco(alpha=1.0)", "not from 0 to 1", "alpha=0.5"),
        ("elastic(beta=1.5)", "not above 0 and up to 1", "beta=0.9"),
        ("elastc(every=2)", "sync=elastc is unknown", "did you mean elastic?"),
        ("pairs(delay=2)", '"delay" is no option', "pairs(every=1)"),
        ("average((every=2))", "cannot read", "sync=average(every=16)"),
    ],
)
def test_what_is_refused_and_the_advice(text: str, what: str, fix: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse(text)
    assert what in str(caught.value)
    assert fix in str(caught.value).partition("  fix ")[2]


@pytest.mark.parametrize(("count", "group", "fits"), [(4, 2, True), (2, 2, False), (6, 4, False)])
def test_groups_must_split_the_replicas(count: int, group: int, fits: bool) -> None:
    strategy = parse(f"average(every=2, then=4, group={group})")
    if fits:
        strategy.check(count)
        return
    with pytest.raises(LayoutError, match=f"group={group} does not split replica={count}"):
        strategy.check(count)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("replica=2", "does not say how its replicas agree"),
        ("data=2 sync=average", "says how replicas agree, which"),
        ("replica=2 sync=averag(every=2)", "did you mean average"),
        ("replica=2 sync=average(every=2, then=4)", "does not split replica=2"),
    ],
)
def test_a_layout_is_refused_before_anything_starts(layout: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        tutti.distribute(lambda model: None, None, None, layout)  # type: ignore[arg-type]
