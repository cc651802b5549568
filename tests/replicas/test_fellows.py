"""The ranks of one replica agree: on counts of words, on lost replicas, and on the numbers of each round."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import replicas_train as training
import tutti
from rank_pools import Pool
from ranks import Ranks
from tutti.errors import CommError
from tutti.layout import Layout
from tutti.replicas import fellows
from tutti.replicas.between import Between
from tutti.replicas.fellows import Fellows, neighbours


class Replica:
    """One replica of this process; `ranks` begin at 10."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, seconds: float = 20.0) -> None:
        self.ranks = list(range(10, 10 + size))
        self.sockets: dict[int, dict[int, socket.socket]] = {rank: {} for rank in self.ranks}
        for rank in self.ranks:
            for above in neighbours(self.ranks, rank)[0]:
                self.sockets[rank][above], self.sockets[above][rank] = socket.socketpair()
        monkeypatch.setattr(
            fellows, "connect_lines", lambda above, below, groups: self.sockets[groups.rank]
        )
        self.given_up: dict[int, dict[int, str]] = {rank: {} for rank in self.ranks}
        self.heard = {rank: Heard(self.given_up[rank]) for rank in self.ranks}
        self.fellows = {
            rank: Fellows(
                self.ranks,
                SimpleNamespace(rank=rank, timeout=timedelta(seconds=seconds)),  # type: ignore[arg-type]
                self.heard[rank].give_up,
            )
            for rank in self.ranks
        }

    def count(self, key: str, words: dict[int, list[str]]) -> dict[int, Any]:
        """What each of these ranks hears, or its error."""
        found: dict[int, Any] = {}

        def say(rank: int) -> None:
            try:
                found[rank] = self.fellows[rank].count(key, words[rank])
            except CommError as error:
                found[rank] = str(error)
                self.end(rank)  # as a process that ends with it

        threads = [threading.Thread(target=say, args=(rank,)) for rank in words]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
            assert not one.is_alive()
        return found

    def end(self, rank: int) -> None:
        """What the kernel does when a process is killed."""
        for one in self.sockets[rank].values():
            one.shutdown(socket.SHUT_RDWR)


class Heard:
    """Keeps what a rank gives up."""

    def __init__(self, found: dict[int, str]) -> None:
        self.found = found

    def give_up(self, gone: Mapping[int, str]) -> None:
        self.found.update(gone)


@pytest.mark.parametrize("size", range(1, 9))
def test_all_ranks_hear_how_many_say_each_word(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(size, monkeypatch)
    for k in range(3):
        words = {
            rank: ["all", *(f"{d} divides" for d in (2, 3) if not (rank + k) % d)]
            for rank in replica.ranks
        }
        expected = Counter(word for said in words.values() for word in said)
        assert replica.count(f"round {k}", words) == dict.fromkeys(replica.ranks, expected)


def test_ranks_that_agree_on_two_things_at_once_do_not_mix_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica(3, monkeypatch)
    found: dict[str, Any] = {}

    def both(key: str) -> None:
        found[key] = replica.count(key, {rank: [key] for rank in replica.ranks})

    threads = [threading.Thread(target=both, args=(key,)) for key in ("a", "b")]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for key in ("a", "b"):
        assert [*found[key].values()] == [Counter({key: 3})] * 3


@pytest.mark.parametrize("teller", range(10, 15))
def test_all_ranks_give_up_a_replica_that_one_has_lost(
    teller: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(5, monkeypatch)
    for _ in range(2):
        replica.fellows[teller].tell({1: "it has gone"})
    others = [rank for rank in replica.ranks if rank != teller]
    until = time.monotonic() + 20
    while not all(replica.given_up[rank] for rank in others) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(replica.given_up[rank] == {1: "it has gone"} for rank in others)


@pytest.mark.parametrize("victim", range(10, 15))
def test_the_loss_of_a_rank_ends_all_of_its_replica(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(5, monkeypatch)
    replica.end(victim)
    found = replica.count("round", {rank: [] for rank in replica.ranks if rank != victim})
    assert all("of this replica is lost" in str(said) for said in found.values())
    assert any(f"rank {victim} of this" in str(said) for said in found.values())


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(2, monkeypatch, 0.5)
    assert "rank 11 did not agree with its replica within 0.5 s" in replica.count("x", {10: []})[10]


def kill_in_a_round(layout: str, victim: int, part: str) -> Any:
    """Replicas of two ranks: one is killed in its second round, before it has sent a part or a mean.

    Its fellow, which has other counterparts, sends all that it has to send.
    """
    step = tutti.distribute(training.train_step, *training.make(), layout)
    training.run(step, 0, 3)
    assert step.agreeing is not None and step.agreeing.team is not None
    post, send = step.agreeing.team.between.post, step.agreeing.team.between.post.send

    def kill(to: int, topic: str, *rest: Any) -> None:
        if topic.startswith(part):
            time.sleep(0.5)  # the fellow's letters arrive
            os.kill(os.getpid(), signal.SIGKILL)
        send(to, topic, *rest)

    if dist.get_rank() == victim:
        post.send = kill  # type: ignore[method-assign]
    try:
        for k in range(3, 10):
            time.sleep(0.2 * ("pairs" in layout or "elastic" in layout))  # they wait for no other
            if k == 9 and dist.get_rank() // 2 != victim // 2:
                wait_for_a_loss(step.agreeing.team.between)  # the victim may be late
            training.one(step, k)
    except tutti.CommError:
        step.agreeing.team.between.post.close()  # as a script that has lost a rank of its own replica
        os._exit(1)
    return training.state_of(step), list(step.agreeing.team.between.lost())


def wait_for_a_loss(between: Between) -> None:
    until = time.monotonic() + 30
    while not between.lost() and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("layout", "part", "victim"),
    [
        ("replica=2 data=2 sync=average(every=2)", "part", 2),
        ("replica=2 data=2 sync=diloco(every=2)", "part", 3),
        ("replica=2 data=2 sync=diloco(every=2, delay=1)", "mean", 1),
        ("replica=2 data=2 sync=diloco(every=2, traffic=int8)", "mean", 0),
        ("replica=2 data=2 sync=gossip()", "push", 2),
        ("replica=2 data=2 sync=pairs(every=1)", "call", 0),
        ("replica=2 data=2 sync=pairs(every=1)", "reply", 3),
        ("replica=2 data=2 sync=elastic(every=1)", "reply", 2),
    ],
)
def test_a_replica_that_loses_one_rank_in_a_round_counts_on_no_rank_of_another(
    layout: str, part: str, victim: int
) -> None:
    """The ranks of the other replica hold the same weights, with the numbers of the lost one or without."""
    pool, lost = Pool(4), {victim // 2 * 2, victim // 2 * 2 + 1}
    try:
        call = kill_in_a_round.__module__, kill_in_a_round.__qualname__, (layout, victim, part)
        for pipe in pool._pipes:
            pipe.send(call)
        answers = {rank: pool._answer(rank) for rank in range(4)}
    finally:
        pool.close()
    left = [found for rank, (ok, found) in answers.items() if rank not in lost and ok]
    assert len(left) == 2, answers
    (one, lost_by_one), (other, lost_by_other) = left
    assert lost_by_one == lost_by_other == [victim // 2]
    for name, x in one.items():
        assert np.array_equal(x, other[name]), name


def weights_after_every_step(layout: str, steps: int) -> list[Any]:
    """Each rank of a replica is late at times of its own."""
    step = tutti.distribute(training.train_step, *training.make(), layout)
    training.one(step, 0)
    assert step.agreeing is not None and step.agreeing.team is not None
    calls, found = step.agreeing.team.calls, []
    events: list[Any] = []
    calls.note = events.append
    for k in range(1, steps):
        time.sleep(0.003 * ((dist.get_rank() * 7 + k) % 4))
        training.one(step, k)
        found.append(
            training.flat({n: x.detach() for n, x in step.state_dict().items()}, step.model)
        )
    dist.barrier()
    return [found, events]


@pytest.mark.parametrize(
    "layout",
    [
        "replica=2 data=2 sync=pairs(every=1)",
        "replica=2 data=2 sync=elastic(every=1)",
        "replica=2 data=2 zero=1 sync=elastic(every=2)",
        "replica=2 tensor=2 sync=pairs(every=2)",
    ],
)
def test_calls_without_waiting_land_at_the_same_step_on_all_ranks_of_a_replica(
    ranks: Ranks, layout: str
) -> None:
    n = Layout.parse(layout).num_ranks
    found = ranks.run(weights_after_every_step, layout, 24, n=n)
    for first in range(0, n, 2):
        (one, events), (other, others) = found[first : first + 2]
        assert events == others
        assert all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))
    kinds = {event[0] for _, events in found for event in events}
    assert kinds == {"round", "answer", "land"}


def return_with_another_rate(layout: str, path: str, returns: bool) -> Any:
    """A run that is loaded again at an earlier step, with a smaller learning rate from then on."""
    step = tutti.distribute(training.train_step, *training.make("sgd"), layout)
    training.run(step, 0, 5)
    step.save(path)
    if returns:
        training.run(step, 5, 9)
        step.load(path)
    step.optimizer.param_groups[0]["lr"] = 0.01  # type: ignore[union-attr]
    training.run(step, 5, 9)
    return training.state_of(step)


@pytest.mark.parametrize(
    "sync",
    ["average(every=4)", "diloco(every=4, delay=1)", "gossip()", "average(every=2, traffic=int8)"],
)
def test_a_round_that_a_run_returns_to_exchanges_its_new_numbers(
    ranks: Ranks, tmp_path: Any, sync: str
) -> None:
    layout = f"replica=2 sync={sync}"
    expected = ranks.run(return_with_another_rate, layout, str(tmp_path / "a"), False, n=2)
    found = ranks.run(return_with_another_rate, layout, str(tmp_path / "b"), True, n=2)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, x in one.items():
            assert np.array_equal(x, other[name]), name
