"""A mean while a replica is lost: at every letter that it sends, and before others have come to the round."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from posts import Desk, desks
from tutti.comm.posts.letters import Letter
from tutti.errors import CommError
from tutti.replicas.mean import Mean
from tutti.replicas.meeting import Meeting

ROUNDS = 3


class Dead(Exception):
    """The replica has been killed."""


class Replica:
    """One replica of this process: it takes means of known numbers, and may be killed after some letters."""

    def __init__(self, desk: Desk, count: int, dies_after: int | None = None) -> None:
        self.number, self.count, self.desk = desk.rank, count, desk
        self.meeting = Meeting(range(count), desk.rank, 20.0)
        self.meeting.post = desk.post
        self._left = dies_after
        self.lives_until = lambda: None
        desk.reply = lambda rank, letter: self.meeting.handle(rank, letter)
        for rank, letter in desk.letters:
            self.meeting.handle(rank, letter)
        self._send, desk.post.send = desk.post.send, self.send  # type: ignore[method-assign]
        self.found: list[Tensor] = []
        self.of: list[list[tuple[int, ...]]] = []  # the replicas in each part
        self.error: BaseException | None = None

    def send(self, to: int, topic: str, tensors: Mapping[str, Tensor] | None = None) -> None:
        """What has been sent before the kill arrives."""
        if self._left == 0:
            threading.Thread(target=self._end).start()
            raise Dead
        self._left = None if self._left is None else self._left - 1
        self._send(to, topic, tensors)

    def _end(self) -> None:
        self.desk.post.flush()
        self.lives_until()
        self.desk.die()

    def run(self, late_seconds: float = 0.0, compression: str = "fp32") -> None:
        """Some rounds."""
        try:
            for k in range(ROUNDS):
                time.sleep(late_seconds)
                x = {"x": numbers(self.number, k)}
                side = Mean(compression, x, {}, self.number, self.count)
                parts = self.meeting.mean(f"{k}.0", range(self.count), side.parts, side.combine)
                self.found.append(side.assemble([message for message, _ in parts])["x"])
                self.of.append([of for _, of in parts])
        except (Dead, CommError) as error:
            self.error = error


def numbers(replica: int, k: int) -> Tensor:
    return torch.full((12,), float(10**replica * (k + 1)), dtype=torch.float64)


def play(count: int, dies_after: int | None, late: dict[int, float]) -> list[Replica]:
    """All rounds; the last replica is the one that is killed."""
    made = [
        Replica(desk, count, dies_after if desk.rank == count - 1 else None)
        for desk in desks(count)
    ]
    threads = [
        threading.Thread(target=r.run, args=(late.get(r.number, 0.0),), daemon=True) for r in made
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
        assert not one.is_alive(), "a replica waits for ever"
    return made


def means_of(count: int, k: int) -> list[float]:
    """With and without the replica that is killed."""
    each = [float(numbers(i, k)[0]) for i in range(count)]
    return [sum(each) / count, sum(each[:-1]) / (count - 1)]


@pytest.mark.parametrize("late", [{}, {0: 0.03}, {1: 0.03}], ids=str)
@pytest.mark.parametrize("dies_after", range(0, 13))
def test_a_kill_at_any_letter_leaves_the_others_with_one_mean(
    dies_after: int, late: dict[int, float]
) -> None:
    """Of four replicas each sends 3 parts and 3 means a round. All numbers of a part are of the same
    replicas, with the lost one or without; it was lost in one round, and is in none after it."""
    *left, lost = play(4, dies_after, late)
    assert isinstance(lost.error, Dead)
    assert [r.error for r in left] == [None] * 3
    first = dies_after // 6
    for k in range(ROUNDS):
        xs = [r.found[k] for r in left]
        assert all(torch.equal(x, xs[0]) for x in xs)
        assert all(r.of[k] == left[0].of[k] for r in left)
        whole, rest = means_of(4, k)
        for x, of in zip(xs[0].view(4, 3), left[0].of[k], strict=True):
            assert x.unique().numel() == 1
            assert float(x[0]) == pytest.approx({4: whole, 3: rest}[len(of)])
        if k < first:
            assert xs[0][0] == pytest.approx(whole)
        if k > first:
            assert xs[0].unique().numel() == 1 and xs[0][0] == pytest.approx(rest)


def test_nobody_is_left_out_while_nobody_is_lost() -> None:
    made = play(3, None, {2: 0.05})
    for k in range(ROUNDS):
        for r in made:
            torch.testing.assert_close(r.found[k], torch.full((12,), means_of(3, k)[0]).double())


def test_the_last_one_left_goes_on_alone() -> None:
    one, _ = play(2, 0, {})
    assert one.error is None and [float(x[0]) for x in one.found] == [1.0, 2.0, 3.0]


def test_the_mean_that_one_has_of_a_lost_owner_is_the_mean_of_all() -> None:
    """The owner is killed when it has told one replica of two: the other hears it from that one."""
    a, b, c = (Replica(desk, 3, 5 if desk.rank == 2 else None) for desk in desks(3))
    # Parts to 0 and 1, the mean of part 2 to 0, then the kill before that to 1: four letters in all.
    c._left = 3
    # A letter that has arrived is not read where a send to c has failed before: c lives until it is.
    c.lives_until = lambda: a.desk.wait(
        lambda: any(letter.topic.startswith("mean 0.0 2 ") for _, letter in a.desk.letters)
    )
    threads = [threading.Thread(target=r.run, daemon=True) for r in (a, b, c)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    assert isinstance(c.error, Dead)
    assert torch.equal(a.found[0], b.found[0])
    assert float(b.found[0][-1]) == pytest.approx(means_of(3, 0)[0])


def test_who_is_given_up_by_the_others_says_so_and_ends() -> None:
    a, b = (Replica(desk, 2) for desk in desks(2))
    a.desk.post.give_up(1, "no sign of life for 5 s")
    b.desk.wait(lambda: bool(b.desk.post._hub.refused))
    b.run()
    assert isinstance(b.error, CommError) and "gone on without this one" in str(b.error)
    a.run()
    assert a.error is None and float(a.found[0][0]) == 1.0


def test_a_replica_that_lives_and_does_not_come_is_named() -> None:
    a, b = (Replica(desk, 2) for desk in desks(2))
    a.meeting._timeout = 0.1
    a.run()
    assert isinstance(a.error, CommError)
    assert "replicas 1 did not join the mean after step 0 within 0.1 s" in str(a.error)
    assert b.desk.post.is_here(0)


def test_letters_of_a_round_that_has_closed_are_forgotten() -> None:
    a, b = (Replica(desk, 2) for desk in desks(2))
    threads = [threading.Thread(target=r.run) for r in (a, b)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    for k in range(ROUNDS):
        a.meeting.handle(1, Letter(f"part {k}.0 0", {}))
    assert len(a.meeting._rounds) <= 4 and len(a.found) == ROUNDS
