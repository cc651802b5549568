"""Every interleaving of small worlds, searched to the end; faults put in on purpose are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.small_worlds import Bounds, Violation, search
from server.protocol.broken import answers_first, fences_nobody, forgets_sequences
from tutti.server.protocol import machine
from tutti.server.protocol.machine import Answers, Machine
from tutti.server.protocol.messages import Push

# With the states that there are at least.
WORLDS = [
    (Bounds("async", doubles=1), 4000),
    (Bounds("async", server_crashes=1, drops=1), 6000),
    (Bounds("async", leases=1), 2000),
    (Bounds("async", workers=1, pushes=2, worker_crashes=1, server_crashes=1, doubles=1), 3000),
    (Bounds("bounded(1)", pushes=2), 2000),
    (Bounds("async(after=1)", pushes=2, server_crashes=1), 1500),
    (Bounds("step", pushes=2, drops=1, server_crashes=1), 2000),
    (Bounds("step", worker_crashes=1), 3000),
    (Bounds("async(after=1)", leases=1, drops=1), 4000),
    (Bounds("step", servers=2), 4000),
    (Bounds("step", servers=2, workers=1, coupled=True, server_crashes=1, drops=1), 400),
]


@pytest.mark.parametrize(("bounds", "least"), WORLDS, ids=[str(k) for k in range(len(WORLDS))])
def test_each_push_counts_once_in_every_small_world(bounds: Bounds, least: int) -> None:
    found = search(bounds)
    print(bounds, found)
    assert found.complete and found.finals and found.states >= least


def _wakes_nobody(self: Machine) -> Answers:
    while self._close() and self._settle_alone():
        pass
    return []


@pytest.mark.parametrize(
    ("name", "fault", "bounds", "said"),
    [
        ("_push", forgets_sequences, Bounds(doubles=1), "written down twice"),
        ("_decide", answers_first, Bounds(server_crashes=1), "records make 0|another ledger"),
        ("_refuse_stranger", fences_nobody, Bounds(worker_crashes=1), None),
        ("_go_on", _wakes_nobody, Bounds("step", pushes=2), "no end is reached"),
    ],
)
def test_a_broken_server_is_found(
    name: str,
    fault: Callable[..., object],
    bounds: Bounds,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Machine, name, fault)
    if name == "_push":
        monkeypatch.setitem(machine._HANDLE, Push, fault)
    with pytest.raises(Violation, match=said):
        search(bounds)
