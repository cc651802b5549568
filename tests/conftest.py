"""Fixtures that every test may use."""
# ruff: noqa: E402  # a server of copies starts before the imports

from __future__ import annotations

import os

import shared_server

# Hundreds of short runs would measure a call each; tests/recording, and the examples, do it.
os.environ["TUTTI_PREDICTION"] = "0"
shared_server.start_early()  # it imports what the modules below do

import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.fx.experimental import symbolic_shapes

from ranks import Ranks, collect_seldom
from roomy import roomy
from tutti.graph.edits.quick import quickly_written

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
    "planner/placement/test_placement.py",
    "benchmarks/test_fuzz.py",
    "calls/test_divergence.py",
    "comm/collectives/test_lone_ranks.py",
    "launch/test_causes.py",
    "propagate/test_expert_moves.py",
    "test_examples.py",
    "resuming/test_stops.py",
    "faults/test_faults.py",
    "planner/test_memory.py",
    "execution/test_training.py",
    "launch/test_supervise.py",
    "calls/test_python_values.py",
    "calls/test_sharded_batch.py",
    "resuming/test_background.py",
    "verification/test_rounding.py",
    "state/test_memory.py",
    "cli/test_plan.py",
    "calls/test_read_values.py",
    "execution/test_precision.py",
    "saving/test_checkpoint.py",
    "launch/test_launch.py",
    "calls/test_first_call.py",
    "replicas/test_lost.py",
    "server/protocol/test_small_worlds.py",
    "calibration/test_cluster_links.py",
    "execution/test_pipeline.py",
    "replicas/test_meeting.py",
    "data/test_shared_reads.py",
    "saving/test_weight_files.py",
    "state/test_pipeline_state.py",
    "execution/test_cuda_graph.py",
    "saving/test_saves.py",
    "state/test_whole.py",
    "resuming/test_checkpoints.py",
    "recording/test_recorded_runs.py",
    "resuming/test_kills.py",
    "launch/test_waits.py",
    "execution/test_uneven.py",
    "planner/depth/test_composed.py",
    "pipeline/schedule/test_schedules.py",
    "checkpoint/test_folder.py",
    "capture/test_sizes.py",
    "verification/test_other_forms.py",
    "benchmarks/test_published_rates.py",
    "calls/test_captures.py",
    "passes/test_filled_slots.py",
    "replicas/test_ranks.py",
    "server/wire/connections/test_shortage.py",
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


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    """Room for the frames of the test: 2 % of its time."""
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.wraps(test)(functools.partial(roomy, test))
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers that have imported already."""
    command = shared_server.worker_command()
    for spec in specs:
        if command is not None and spec.popen and not spec.python:
            spec.python = command


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


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Tensors in float64 unless a test says otherwise, from one seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
