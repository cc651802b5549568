"""Memory that a worker and a server of one host share."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from server.protocol.test_simulated import synchronous
from server.protocol.updaters import LR, ClippedAdam, Sgd, gradient
from server.wire.running import all_at_once, client, like, services, train
from tutti.environment import SHARED_MEMORY
from tutti.server.protocol.update import WEIGHT
from tutti.server.wire.connections import region
from tutti.server.wire.connections.region import Half, RegionOffer, accepted
from tutti.server.wire.frames.codec import MalformedError


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each part that lay in shared memory; small ones lie there too."""
    found: list[int] = []
    take = Half.take

    def noted(self: Half, begin: int, into: Tensor, *, summed: bool = False) -> int:
        found.append(len(into))
        return take(self, begin, into, summed=summed)

    monkeypatch.setattr(region, "LEAST_NBYTES", 0)
    monkeypatch.setattr(Half, "take", noted)
    return found


def test_step_is_one_device_through_shared_memory(taken: list[int]) -> None:
    updater = ClippedAdam()
    with services(updater, "step", 2, 2) as running:
        at = [s.address for s in running]
        all_at_once(*(functools.partial(train, updater, "step", at, w, 4) for w in range(2)))
        with client(updater, "step", at, -1) as observer:
            found = observer.pull_state()
    for n, x in synchronous(updater, 2, 4).items():
        torch.testing.assert_close(found[n][WEIGHT], x, rtol=1e-12, atol=1e-12)
    pushes_and_pulls = 2 * 2 * 4 * sum(x.nbytes for x in synchronous(updater, 2, 0).values())
    assert sum(taken) > pushes_and_pulls / 2  # all but those before both ends had the memory


def test_without_it_everything_goes_through_sockets(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_MEMORY.name, "off")
    updater = Sgd()
    with services(updater, "async", 1) as running:
        train(updater, "async", [running[0].address], 0, 3)
    assert not taken


def test_a_worker_that_cannot_open_it_goes_through_sockets(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the server's process is another user's, or on another host behind a tunnel."""
    offered = RegionOffer.__init__

    def elsewhere(self: RegionOffer, nbytes: int) -> None:
        offered(self, nbytes)
        self.message = replace(self.message, word="00" * 64)

    monkeypatch.setattr(RegionOffer, "__init__", elsewhere)
    updater = Sgd()
    with services(updater, "async", 1) as running:
        with client(updater, "async", [running[0].address], 0) as one:
            one.join()
            seen = like(updater)
            for clock in range(3):
                one.pull(seen)
                assert one.push(gradient(seen, 0, clock), {"lr": LR}).taken
        assert running[0].machine.ledger.version == 3
    assert not taken


def test_both_ends_see_the_same() -> None:
    offer = RegionOffer(100_000)
    halves = accepted(offer.message)
    assert halves is not None
    x = torch.randn(20_000)
    for ours, theirs in ((offer.incoming, halves[0]), (halves[1], offer.outgoing)):
        begin = theirs.put([torch.arange(3), x])
        assert begin == 0
        back = torch.empty(24 + x.nbytes, dtype=torch.uint8)
        ours.take(begin, back)
        assert torch.equal(back[24:].view(torch.float32), x)
        assert theirs.put([x]) is None  # no room behind it
        theirs.begin()
        assert theirs.put([x]) == 0
        with pytest.raises(MalformedError, match="does not lie in the shared memory"):
            ours.take(100_000, back)
    offer.close()
    assert accepted(offer.message) is None


def test_nobody_can_change_its_size() -> None:
    """Who cuts a mapped file off would kill the other end."""
    offer = RegionOffer(100_000)
    for size in (0, 1_000_000):
        with pytest.raises(PermissionError):
            os.ftruncate(offer.message.descriptor, size)
    offer.close()
