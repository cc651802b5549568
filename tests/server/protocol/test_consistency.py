"""How far workers may run apart, as text."""

from __future__ import annotations

import pytest

from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.server.protocol.consistency import Consistency, parse


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("step", Consistency()),
        ("step(traffic=int8)", Consistency(traffic="int8")),
        ("async", Consistency(None)),
        ("async(damped)", Consistency(None, damped=True)),
        ("bounded(2)", Consistency(2)),
        ("async(after=300, damped)", Consistency(None, 300, damped=True)),
        ("async(predict)", Consistency(None, predict=True)),
        ("bounded(1, after=20, traffic=int8)", Consistency(1, 20, traffic="int8")),
        ("bounded(2, ahead, traffic=bf16)", Consistency(2, ahead=True, traffic="bf16")),
    ],
)
def test_text_parses_and_prints_back(text: str, found: Consistency) -> None:
    assert parse(text) == found and str(found) == text
    assert parse(Layout.parse(f"replica=2 server=1 sync={text}").sync) == found


def test_words_stand_in_any_order_and_nothing_ahead_is_step() -> None:
    assert parse("async(traffic=bf16, ahead, damped)") == parse("async(damped,ahead,traffic=bf16)")
    assert parse("async(after=0)") == parse("async") and not parse("async").both
    assert parse("bounded(0)") == parse("step") and str(parse("bounded(0)")) == "step"


@pytest.mark.parametrize(
    "text",
    ["stp", "bounded", "bounded()", "bounded(-1)", "bounded(ahead)", "step(ahead)", "async(2)"]
    + ["async(traffic=fp64)", "async(damped, damped)", "bounded(0, damped)", "async(fast)"]
    + [
        "step(after=3)",
        "bounded(0, after=3)",
        "async(after)",
        "async(after=-1)",
        "async(after=1.5)",
    ]
    + ["async(after=1, after=2)", "async(damped=1)", "step(predict)", "bounded(after=3)"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="no consistency of servers"):
        parse(text)
