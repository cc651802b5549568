"""A rank that is killed: the other replicas go on, whatever their strategy, and the run ends well."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

import forked
import replicas_train as training
from rank_pools import Pool, RankFailed
from tests.replicas.lost_ranks import BAD_STEP, STEPS, train_without
from tutti.launch.records import Failure
from tutti.launch.stand_in import _is_lost
from tutti.layout import Layout

SYNCS = [
    "average(every=2)",
    "diloco(every=3, fragments=2, delay=1, traffic=int8)",
    "gossip(every=1)",
    "pairs(every=1)",
    "elastic(every=2)",
]
SCRIPT = Path(__file__).parents[1] / "launch" / "lost.py"


def survivors(syncs: list[str], layout: str, victim: int, lost: set[int]) -> dict[int, tuple]:
    """What the ranks that are left return."""
    n = Layout.parse(layout).num_ranks
    pool = Pool(n)
    try:
        call = train_without.__module__, train_without.__qualname__, (syncs, layout, victim)
        for pipe in pool._pipes:
            pipe.send(call)
        answers = {rank: pool._answer(rank) for rank in range(n)}
    finally:
        pool.close()
    for rank, (ok, text) in answers.items():
        if ok == (rank in lost):
            raise RankFailed(f"rank {rank}: {text}")
    return {rank: found for rank, (ok, found) in answers.items() if ok}


def test_the_others_go_on_and_agree() -> None:
    found = survivors(SYNCS, "replica=3", 1, {1})
    assert found.keys() == {0, 2}
    for losses, ends in found.values():
        assert ends["lost"] == {(1,)}
        for sync in SYNCS:
            assert len(losses[sync]) == STEPS - BAD_STEP and np.isfinite(losses[sync]).all()
    names = [n for n, _ in training.make()[0].named_parameters()]
    apart = {
        sync: max(np.abs(found[0][1][sync][n] - found[2][1][sync][n]).max() for n in names)
        for sync in SYNCS
    }
    assert apart[SYNCS[0]] == 0  # the last step ends with a mean
    # A few steps of AdamW on their own take them 0.01 each.
    assert all(apart[sync] < 0.05 for sync in SYNCS[1:3]), apart


def test_all_ranks_of_a_replica_go_with_the_one_that_is_killed() -> None:
    found = survivors(SYNCS[:1], "replica=2 data=2 zero=1", 3, {2, 3})
    assert found.keys() == {0, 1}
    assert all(ends["lost"] == {(1,)} for _, ends in found.values())
    assert found[0][0][SYNCS[0]] == pytest.approx(found[1][0][SYNCS[0]])


def test_a_run_ends_well_and_saves_without_its_first_replica(tmp_path: Path) -> None:
    layout = "replica=2 sync=average(every=3)"
    words = ["run", "-n", "2", "--layout", layout, str(SCRIPT), "0", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(["-m", "tutti", *words], env=env, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 0 died (signal 9)" in done.stderr
    line = "replica 0 is lost: its connection has closed; replica 1 goes on (of 2) (--log-dir DIR keeps"
    assert done.stderr.count(line) == 1 and done.stderr.startswith(line)
    assert ": the others went on without replica 0" in done.stderr
    weights = [float(x) for x in (tmp_path / "1.txt").read_text().split()]
    state = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    state_dict_loader.load(state, checkpoint_id=str(tmp_path / "saved"))
    assert torch.cat([state["weight"].reshape(-1), state["bias"]]).tolist() == pytest.approx(
        weights
    )


@pytest.mark.parametrize("victim", [0, 1, None])
def test_a_replica_that_leaves_early_is_named(victim: int | None, tmp_path: Path) -> None:
    """It leaves after step 5; the next round is that of step 6. Nothing is said where all end together."""
    words = ["run", "--layout", "replica=2 sync=average(every=3)", str(SCRIPT)]
    words += ["9" if victim is None else str(victim), str(tmp_path), "leave"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "60"}
    done = forked.run(["-m", "tutti", *words], env=env, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    if victim is None:
        assert "replica" not in done.stderr
        return
    line = f"replica {victim} has left by step 6; replica {1 - victim} goes on (of 2)"
    assert done.stderr.count(line) == 1 and "is lost" not in done.stderr
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("layout", "victim", "when"),
    [
        ("replica=2", 0, "save"),
        ("replica=2", 1, "save"),
        ("replica=3", 2, "save"),
        ("replica=3", 0, "save"),
        ("replica=2 data=2 zero=3", 3, "save"),
        ("replica=2 data=2 zero=3", 3, "late"),
        ("replica=2 data=2 zero=3", 0, "late"),
        ("replica=3 data=2 zero=3", 1, "save"),
    ],
)
def test_a_replica_that_dies_in_a_save_is_left_out_of_it(
    layout: str, victim: int, when: str, tmp_path: Path
) -> None:
    size = 2 if "data=2" in layout else 1
    replica = victim // size
    words = ["run", "--layout", f"{layout} sync=average(every=3)"]
    words += [str(SCRIPT), str(victim), str(tmp_path), when]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "60"}
    done = forked.run(["-m", "tutti", *words], env=env, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f": the others went on without replica {replica}" in done.stderr
    first = 0 if replica else size
    weights = [float(x) for x in (tmp_path / f"{first}.txt").read_text().split()]
    state = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    state_dict_loader.load(state, checkpoint_id=str(tmp_path / "saved"))
    saved = torch.cat([state["weight"].reshape(-1), state["bias"]]).tolist()
    assert saved == pytest.approx(weights)  # all replicas have the same after a round
    assert len(list((tmp_path / "saved").glob("state-*"))) == 1


def test_a_replica_that_is_stopped_does_not_keep_the_others_from_saving(tmp_path: Path) -> None:
    """The first rank holds the lock of the folder. It is lost long before the launcher would end it."""
    layout = "replica=2 sync=average(every=3)"
    words = ["run", "--layout", layout, str(SCRIPT), "0", str(tmp_path), "stop"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "100", "TUTTI_LEASE": "3"}
    done = forked.run(["-m", "tutti", *words], env=env, cwd=tmp_path, timeout=90)
    assert done.returncode == 0, done.stderr
    assert (
        "rank 0 was stopped (SIGSTOP) and did not go on; the launcher has killed it: "
        in done.stderr
    )
    assert ": the others went on without replica 0" in done.stderr
    weights = [float(x) for x in (tmp_path / "1.txt").read_text().split()]
    state = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    state_dict_loader.load(state, checkpoint_id=str(tmp_path / "saved"))
    found = torch.cat([state["weight"].reshape(-1), state["bias"]]).tolist()
    assert found == pytest.approx(weights)


def test_what_counts_as_lost() -> None:
    mistake = Failure(0, "ValueError", "", 0.0)
    peer = Failure(0, "CommError", "", 0.0, is_tutti=True, is_comm=True)
    assert _is_lost(-9, None) and _is_lost(-11, None) and _is_lost(1, peer)
    assert not _is_lost(1, mistake) and not _is_lost(0, None) and not _is_lost(143, None)
    assert not _is_lost(-15, None) and not _is_lost(1, None)
