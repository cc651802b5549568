"""While a step is compiled the collector looks rarely and at new objects alone; then all is as before."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tutti.execution import collector
from tutti.execution.collector import rarely_collected


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kept, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.unfreeze()
    monkeypatch.setattr(collector, "_frozen_by_process", False)
    yield
    gc.set_threshold(*kept)
    if frozen:
        gc.freeze()


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(("before", "inside"), [(700, 20_000), (50_000, 50_000), (0, 0)])
def test_less_often_and_as_before_even_after_an_error(before: int, inside: int) -> None:
    gc.set_threshold(before, 7, 5)
    with pytest.raises(ValueError, match="inside"), rarely_collected():
        assert gc.get_threshold() == (inside, 7, 5)
        raise ValueError("inside")
    assert gc.get_threshold() == (before, 7, 5) and gc.get_freeze_count() == 0


def test_what_is_made_inside_goes_and_what_was_there_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "_LONG", 0.0)
    old = weakref.ref(Circle())
    with rarely_collected():
        new = weakref.ref(Circle())
        gc.collect()
        assert new() is None and old() is not None
        new = weakref.ref(Circle())
    assert new() is None
    gc.collect()
    assert old() is None


def test_short_compilations_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for seconds in (0.0, collector._TOGETHER):
        monkeypatch.setattr(collector, "_spent", seconds)
        with rarely_collected():
            made.append(weakref.ref(Circle()))
        assert (made[0]() is None) == (seconds > 0)
    assert collector._spent == 0.0


def test_a_long_collection_is_followed_by_a_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_pause", collector._TOGETHER)
    monkeypatch.setattr(collector, "_spent", 2 * collector._TOGETHER)
    clock = itertools.accumulate(itertools.repeat(1.0))
    monkeypatch.setattr(collector.time, "thread_time", lambda: next(clock))
    with rarely_collected():
        pass
    assert (collector._spent, collector._pause) == (0.0, collector._TIMES)
    with rarely_collected():
        made = weakref.ref(Circle())
    assert made() is not None and collector._spent == 1.0


def test_what_the_process_has_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with rarely_collected():
        made = [Circle() for _ in range(100)]
    # What other threads or weak references let go of meanwhile is no longer counted.
    assert abs(gc.get_freeze_count() - count) < len(made)


def test_pytorchs_cache_of_fake_calls_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MOST_FAKE_CALLS", 50)
    FakeTensorMode.cache_clear()
    mode, sizes = FakeTensorMode(), []
    for k in range(1, 40):
        with collector.rarely_collected(), mode:
            x = torch.empty(k, 3)
            (x + 1).relu().sum(0).neg()
        sizes.append(FakeTensorMode.cache_info().size)
    assert max(sizes) <= 50 + 10 and any(b < a for a, b in itertools.pairwise(sizes))
