"""Observers of a backward: stacked, the last one nearest to the caller, and gone afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tutti.capture.backwards import Engine, around_backward
from tutti.capture.patch_table import BACKWARD


def engines() -> list[Any]:
    return [patch.original for patch in BACKWARD]


@pytest.mark.parametrize("raised", [None, ValueError, KeyboardInterrupt])
def test_observers_are_stacked(raised: type[BaseException] | None) -> None:
    events: list[str] = []

    def observer(name: str) -> Any:
        def around(run: Engine) -> Engine:
            def backward(*args: Any, **options: Any) -> Any:
                events.append(f"{name} begins")
                if raised is not None and name == "first":
                    raise raised
                try:
                    return run(*args, **options)
                finally:
                    events.append(f"{name} ends")

            return backward

        return around

    before, x = engines(), torch.ones(2, requires_grad=True)
    assert before[0] is before[1]
    try:
        with around_backward(observer("first")), around_backward(observer("second")):
            assert before[0] not in engines()
            x.sum().backward()
    except (ValueError, KeyboardInterrupt):
        pass
    assert engines() == before
    ends = ["second ends"] if raised is not None else ["first ends", "second ends"]
    assert events == ["second begins", "first begins", *ends]
    x.sum().backward()
    assert len(events) == 2 + len(ends)
