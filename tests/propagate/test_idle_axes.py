"""A run warns of an axis of the layout that splits nothing of the step, with the reason."""

from __future__ import annotations

import warnings

import pytest

from subjects import subject
from tutti.layout import Layout


def warned(name: str, layout: str) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        subject(name).program(Layout.parse(layout), {})
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("name", "layout", "why"),
    [
        ("sgd", "expert=2", "no number of stacked experts divides by 2"),
        ("sgd", "seq=2", "no tensor of the batch has a sequence, as its dim 1, that divides by 2"),
        (
            "sgd",
            "zero=3 seq=2",
            "no tensor of the batch has a sequence, as its dim 1, that divides by 2",
        ),
        (
            "gpt",
            "data=2 seq=3",
            "no tensor of the batch has a sequence, as its dim 1, that divides by 3",
        ),
    ],
)
def test_an_axis_that_splits_nothing(name: str, layout: str, why: str) -> None:
    axis = layout.split()[-1]
    (words,) = warned(name, layout)
    assert words.startswith(
        f"{axis} splits nothing of this step, so its ranks all do the same work ({why})"
    )


@pytest.mark.parametrize("layout", ["data=2", "data=2 seq=2", "seq=2 zero=3", ""])
def test_axes_with_an_effect(layout: str) -> None:
    assert warned("gpt", layout) == []
