"""A minute of the fault harness: each fault once, each layout at least once, at moments from fixed seeds.

`python -m benchmarks.faults --minutes 60` draws faults, layouts and moments for an hour.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.harness import LAYOUTS, play
from faults.injected import FAULTS

DATA, ZERO, TENSOR, PIPE, REPLICAS, SERVED, TOGETHER = LAYOUTS
PART = [
    ("a rank is killed", ZERO),
    ("a rank is paused", PIPE),
    ("all are paused", REPLICAS),
    ("a rank raises", TENSOR),
    ("Ctrl-C", ZERO),
    ("the launcher gets SIGTERM", DATA),
    ("the launcher is killed", PIPE),
    ("no room on the disk", ZERO),
    ("no descriptors", DATA),
    ("strangers connect", SERVED),
    ("a server is killed", SERVED),
    ("a rank is killed", TOGETHER),
    ("a server is killed", TOGETHER),
]


@pytest.mark.parametrize(("fault", "layout"), PART)
def test_what_is_promised_under_a_fault(fault: str, layout: str, tmp_path: Path) -> None:
    seed = PART.index((fault, layout))
    play(seed, tmp_path / "run", layout, fault)


def test_the_part_has_every_fault_but_the_longest_and_every_layout() -> None:
    """A stopped rank takes a whole timeout: tests/launch/test_causes.py has it."""
    assert {fault for fault, _ in PART} == set(FAULTS) - {"a rank is stopped"}
    assert {layout for _, layout in PART} == set(LAYOUTS)
