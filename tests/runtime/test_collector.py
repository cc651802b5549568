"""The collector looks rarely while a step is compiled, and as the user wants it afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tutti.runtime.collector import rarely_collected


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    kept = gc.get_threshold()
    yield
    gc.set_threshold(*kept)


@pytest.mark.parametrize(("before", "inside"), [(700, 20_000), (50_000, 50_000), (0, 0)])
def test_less_often_and_as_before_even_after_an_error(before: int, inside: int) -> None:
    gc.set_threshold(before, 7, 5)
    with pytest.raises(ValueError, match="inside"), rarely_collected():
        assert gc.get_threshold() == (inside, 7, 5)
        raise ValueError("inside")
    assert gc.get_threshold() == (before, 7, 5)
