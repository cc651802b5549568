"""Processes that meet in a store: all hear all, errors reach all, and the store is empty afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage]

from tutti.checkpoint.store_ranks import StoreRanks
from tutti.errors import CheckpointError, CommError

SIZE, SECONDS = 3, 20.0


def together(store: Any, name: str, act: Any, size: int = SIZE) -> list[Any]:
    """What `act(ranks)` returns or raises in a thread for each process."""
    found: list[Any] = [None] * size

    def play(position: int) -> None:
        ranks = StoreRanks(store, name, position, size, SECONDS)
        try:
            found[position] = act(ranks)
        except (CheckpointError, CommError) as error:
            found[position] = error
        ranks.leave()

    threads = [threading.Thread(target=play, args=(j,)) for j in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


def test_all_hear_all_and_nothing_remains_in_the_store() -> None:
    store = HashStore()

    def act(ranks: StoreRanks) -> list[list[str]]:
        mine = [[f"{k} of {ranks.position}", "é" * 1000] for k in range(20)]
        return [ranks.each("a test", lambda one=one: one[0] + one[1]) for one in mine]

    for name in ("1", "2"):
        found = together(store, name, act)
        assert found[0] == found[1] == found[2]
        assert found[0][7] == [f"7 of {j}" + "é" * 1000 for j in range(SIZE)]
        assert store.num_keys() == 0


def test_an_error_of_one_is_raised_by_all() -> None:
    def act(ranks: StoreRanks) -> list[str]:
        ranks.each("a test", lambda: "")
        if ranks.position == 1:
            return ranks.each("a test", lambda: str(1 // 0))
        return ranks.each("a test", lambda: "")

    store = HashStore()
    found = together(store, "1", act)
    assert {str(one) for one in found} == {str(found[0])}
    assert isinstance(found[0], CheckpointError) and "rank 1" in str(found[0])
    assert "ZeroDivisionError" in str(found[0])
    assert store.num_keys() == 0


def test_one_process_needs_no_store() -> None:
    ranks = StoreRanks(None, "1", 0, 1, SECONDS)
    assert ranks.each("a test", lambda: "x") == ["x"]
    ranks.leave()


def met(path: Path, position: int, rounds: int) -> StoreRanks:
    store = FileStore(str(path), 2)
    store.set_timeout(timedelta(seconds=SECONDS))
    ranks = StoreRanks(store, "1", position, 2, SECONDS)
    for _ in range(rounds):
        ranks.each("a test", lambda: "x")
    return ranks


def test_a_process_that_has_ended_is_noticed_at_once(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        met(tmp_path / "store", 1, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    ranks = met(tmp_path / "store", 0, 2)
    since = time.monotonic()
    with pytest.raises(CommError, match="rank 1 has ended"):
        ranks.each("a test", lambda: "x")
    assert time.monotonic() - since < SECONDS / 2
    os.waitpid(pid, 0)


def test_one_that_does_not_come_is_named(tmp_path: Path) -> None:
    ranks = StoreRanks(FileStore(str(tmp_path / "store"), 2), "1", 0, 2, 0.5)
    with pytest.raises(CommError, match=r"rank 1 has not come in 0.5 s"):
        ranks.each("a test", lambda: "x")
