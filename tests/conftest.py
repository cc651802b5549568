"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from torch.fx.experimental import symbolic_shapes

from ranks import Ranks, collect_seldom
from tutti.environment import PREDICTION
from tutti.graph.edits.quick import quickly_written

# Hundreds of short runs would measure a call each; tests/recording, and the examples, do it.
os.environ[PREDICTION.name] = "0"

# The longest files, longest first, waits included: a worker must not be left with one of them at the end.
# Before them the collector's own tests, which walk all objects: 1 s in a new process, 8 s in a full one.
FIRST = (
    "execution/test_collector.py",
    "verification/test_models.py",
    "verification/test_pipeline.py",
    "verification/test_precision.py",
    "verification/test_faults.py",
    "verification/test_pipeline_faults.py",
    "partition/test_counts.py",
    "partition/test_wide.py",
    "passes/test_remat.py",
    "benchmarks/test_fuzz.py",
    "calls/test_divergence.py",
    "comm/collectives/test_lone_ranks.py",
    "launch/test_causes.py",
    "verification/test_rounding.py",
    "launch/test_supervise.py",
    "resuming/test_stops.py",
    "test_examples.py",
    "resuming/test_background.py",
    "calls/test_python_values.py",
    "faults/test_faults.py",
    "execution/test_training.py",
    "planner/test_memory.py",
    "state/test_memory.py",
    "resuming/test_checkpoints.py",
    "state/test_whole.py",
    "calls/test_sharded_batch.py",
    "calls/test_first_call.py",
    "replicas/test_lost.py",
    "replicas/test_meeting.py",
    "saving/test_saves.py",
    "data/test_shared_reads.py",
    "server/protocol/test_small_worlds.py",
    "launch/test_launch.py",
    "checkpoint/test_folder.py",
    "execution/test_pipeline.py",
    "saving/test_checkpoint.py",
    "resuming/test_kills.py",
    "execution/test_cuda_graph.py",
    "calls/test_read_values.py",
    "launch/test_waits.py",
    "state/test_pipeline_state.py",
    "saving/test_weight_files.py",
    "execution/test_precision.py",
)
# These verify the same programs, captured once a process (subjects.py): one worker plays all of them.
TOGETHER = FIRST[1:9]
FEW_OBJECTS = 10_000  # new ones of a module of tests, which the next module's may well walk
_TESTS = Path(__file__).parent
_SHARED: list[Ranks] = []  # of all tests

# pytest listens to every logger, so PyTorch would describe each symbol to it: a twentieth of all.
symbolic_shapes.trace_structured = lambda *_, **__: None  # type: ignore[attr-defined]
# As while a step is compiled: of all captures and graphs that tests make by hand, too, a sixth.
_quickly = quickly_written()
_quickly.__enter__()
# A busy machine is no failure.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order is otherwise as it was."""
    place = {_TESTS / name: i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(FIRST)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector, which runs at every capture, need not walk it."""
    gc.freeze()
    collect_seldom()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files to workers; some in groups."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "together" if file.removeprefix("tests/") in TOGETHER else file

    return Groups(config, log)


@pytest.fixture(scope="module", autouse=True)
def what_lasts() -> Iterator[None]:
    """Nor what the tests of a module leave for all others, such as the subjects that they captured."""
    yield
    for pools in _SHARED:
        pools.renew()
    if subjects := sys.modules.get("subjects"):
        subjects.program.cache_clear()  # these do not stay, and would never go once frozen
    new, collections, _ = gc.get_count()
    if collections or new > FEW_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks with a process group, shared by all tests (`ranks.run(function, *args, n=4)`)."""
    pool = Ranks()
    _SHARED.append(pool)
    yield pool
    _SHARED.remove(pool)
    pool.close()
