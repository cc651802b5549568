"""Traces of simulated steps as files."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.estimates.graph_clock import TraceEvent
from tutti.planner.estimates.layout_estimate import traced
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.report.chrome_traces import write_traces


def test_an_event_ends_where_the_next_begins(tmp_path: Path) -> None:
    """Kernels of 2/3 of a nanosecond more than a microsecond: ends are rounded, lengths follow."""
    seconds = 1e-6 + 2e-9 / 3
    events = [TraceEvent(f"k{i}", "device", i * seconds, seconds) for i in range(100)]
    (path,) = write_traces([events], Layout(), 100 * seconds, tmp_path)
    kernels = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    assert len(kernels) == 100
    for before, after in pairwise(kernels):
        assert round(before["ts"] + before["dur"], 3) == after["ts"]


def clipped_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def kernels(layout: str, folder: Path, dtype: torch.dtype = torch.float32) -> list[list[Any]]:
    """The kernels in each file of the traces of a step on 64 H100s."""
    pairs = [(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
    model = nn.Sequential(*[layer for pair in pairs for layer in pair]).to(dtype)
    job = Job.of(clipped_step, model, torch.optim.AdamW(model.parameters()), Layout())
    made = CandidatePrograms(job, (torch.randn(64, 256, dtype=dtype),), on_processors=False)
    program = made.program(Layout.parse(layout))
    estimate, events = traced(program, PricedMachine.of(Cluster.parse("64 x h100")))
    paths = write_traces(events, estimate.layout, estimate.seconds, folder)
    files = [json.loads(path.read_text())["traceEvents"] for path in paths]
    found = [[e for e in file if e.get("cat") == "kernel"] for file in files]
    end = max(e["ts"] + e["dur"] for file in found for e in file)
    assert end <= 1e6 * estimate.seconds + 1e-3
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "data=2 zero=3",
        "data=16 zero=1 micro=2",
        "pipe=4 micro=4",
        "data=4 pipe=2 micro=2 zero=1",
        "data=16 pipe=4 micro=4 zero=1",
        "data=16 pipe=2 micro=4 zero=3",
        "data=8 pipe=2 micro=4 schedule=zbv",
        "data=4 tensor=2 pipe=2 micro=4 zero=1 schedule=interleaved(2)",
    ],
)
def test_the_events_of_each_stream_follow_each_other(layout: str, tmp_path: Path) -> None:
    """A send may be on its way while the gradients of the stage are summed."""
    for found in kernels(layout, tmp_path):
        streams = defaultdict[int, list[Any]](list)
        for one in found:
            assert one["args"]["stream"] == one["tid"]
            streams[one["tid"]].append(one)
        for events in streams.values():
            for before, after in pairwise(sorted(events, key=lambda e: (e["ts"], e["dur"]))):
                assert round(before["ts"] + before["dur"], 3) <= after["ts"], (before, after)


def test_messages_name_their_action_and_their_bytes(tmp_path: Path) -> None:
    first, last = kernels("data=2 pipe=2 micro=4", tmp_path)
    for found, sent in ((first, "0F{}>1"), (last, "1B{}>0")):
        messages = [e for e in found if "SendRecv " in e["name"]]
        names = [f"ncclDevKernel_SendRecv {sent.format(i)}" for i in range(4)]
        assert [e["name"] for e in messages] == names
        assert {e["args"]["bytes"] for e in messages} == {
            64 // 2 // 4 * 1024 * 4
        }  # the cut is beside a GELU


@pytest.mark.parametrize(
    ("dtype", "summed", "gathered"),
    [(torch.float64, "f64", "f64"), (torch.bfloat16, "f32", "bf16")],
)
def test_collectives_name_their_dtype(
    dtype: torch.dtype, summed: str, gathered: str, tmp_path: Path
) -> None:
    """Sums over ranks of values of 16 bits are of 32."""
    (found,) = kernels("data=2 zero=1", tmp_path, dtype)
    named = {(e["name"], e["args"]["dtype"]) for e in found if "dtype" in e["args"]}
    assert (f"ncclDevKernel_ReduceScatter_Sum_{summed}_RING_LL", summed) in named
    assert ("ncclDevKernel_AllGather_RING_LL", gathered) in named
    assert not any("Sum_f32" in name for name, _ in named if summed != "f32")
