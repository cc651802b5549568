"""Counters in shared memory: who waits for whom, also over the wrap-around, and who is told what."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tutti.comm.host import signals as module
from tutti.comm.host.awake import AwakeClock
from tutti.comm.host.life import Life
from tutti.comm.host.signals import LINE, PeerDiffers, PeerLate, PeerLost, Signals


def group_of(
    n: int, *, timeout_seconds: float = 30.0, pids: list[int] | None = None
) -> list[Signals]:
    """Threads of this process as ranks 10, 11, ...: they map the same memory."""
    memory = torch.zeros(n * LINE, dtype=torch.uint8)
    ranks, pids = list(range(10, 10 + n)), pids or [os.getpid()] * n
    return [Signals(memory, ranks, i, pids, timeout_seconds) for i in range(n)]


def together(functions: list[object]) -> None:
    """Run each in a thread; what one raises is raised here."""
    errors: list[BaseException] = []

    def call(function: object) -> None:
        try:
            function()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("start", [0, 2**31 - 20, 2**32 - 20])
@pytest.mark.parametrize("spin", [0.0, 1e-3])
def test_nobody_passes_before_all_have_come(start: int, spin: float) -> None:
    n, num_rounds, passed = 3, 60, [0, 0, 0]
    group = group_of(n)
    for one in group:
        one._spin = spin
        one.count = start
        one._words[one._own] = start

    def rounds(i: int) -> None:
        chance = random.Random(i)
        for number in range(num_rounds):
            if chance.random() < 0.2:
                time.sleep(chance.random() * 2e-3)
            passed[i] = number + 1
            group[i].sync()
            # All have written this round, and none is more than one ahead.
            assert all(number + 1 <= other <= number + 2 for other in passed)

    together([lambda i=i: rounds(i) for i in range(n)])
    assert all(one.count == (start + num_rounds) % 2**32 for one in group)


def test_a_sleeper_is_woken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With looks as rare as this, one lost wake-up would outlast the time that the test may take."""
    if module._FUTEX is None:
        pytest.skip("this machine has no futex that is known here")
    monkeypatch.setattr(module, "_LOOK_SECONDS", 30.5)
    a, b = group_of(2)
    a._spin = b._spin = 0.0
    naps: list[float] = []
    sleep = a._futex

    def timed(j: int, op: int, value: int, seconds: float | None) -> None:
        begin = time.monotonic()
        sleep(j, op, value, seconds)
        naps.append(time.monotonic() - begin)

    a._futex = timed  # type: ignore[method-assign]
    together([lambda: [a.sync() for _ in range(300)], lambda: [b.sync() for _ in range(300)]])
    assert naps and max(naps) < 30.0


def test_notes_that_differ_are_told_to_both() -> None:
    group, told = group_of(2), {}

    def come(i: int) -> None:
        group[i].meet(5)
        with pytest.raises(PeerDiffers) as error:
            group[i].meet(i)
        told[i] = error.value.ranks

    together([lambda: come(0), lambda: come(1)])
    assert told == {0: (11,), 1: (10,)}


def test_notes_that_agree_pass_in_any_order_of_meetings() -> None:
    group, n = group_of(3), 3

    def rounds(i: int) -> None:
        for number in range(200):
            group[i].meet(hash((number, 7)))
            if number % 3 == 0:
                group[i].arrive()  # without waiting, as after reading from an arena

    together([lambda i=i: rounds(i) for i in range(n)])


def test_one_that_has_ended_is_lost_unless_it_had_come_this_far() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    here = os.getpid()
    group = group_of(3, pids=[here, process.pid, here], timeout_seconds=1.0)
    group[0].arrive()
    with pytest.raises(PeerLost) as lost:
        group[0].wait(group[0].count)
    assert lost.value.ranks == (11,)
    group[1].arrive()  # it came, then ended: the third is late
    with pytest.raises(PeerLate) as late:
        group[0].wait(group[0].count)
    assert late.value.ranks == (12,)


def test_a_zombie_has_ended_and_a_stopped_process_is_said_to_be_so() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        life = Life.of(process.pid)
        assert life is Life.of(process.pid)
        assert not life.ended() and life.said() == ""
        process.send_signal(signal.SIGSTOP)
        while not life.said():
            time.sleep(0.01)
        assert life.said() == f" (process {process.pid} is stopped)" and not life.ended()
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has asked for it
    assert life.ended()
    assert Life.of(process.pid) is not life  # the number may be somebody else's by now
    process.wait()


def test_a_forked_process_is_refused() -> None:
    one, _ = group_of(2)
    pid = os.fork()
    if pid == 0:
        try:
            one.arrive()
        except RuntimeError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert one._words[0] == 0


def test_a_suspension_in_a_wait_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the timeout, it ends before the other, who was suspended as well, has come."""
    monkeypatch.setattr(module, "AwakeClock", functools.partial(AwakeClock, 0.1))
    first, second = group_of(2, timeout_seconds=1.0)
    other = threading.Timer(0.3, second.arrive)
    sleep = first._futex

    def suspended(*args: object) -> None:
        if not other.ident:
            time.sleep(1.2)
            other.start()
        sleep(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(first, "_futex", suspended)
    first.sync()
    other.join()
