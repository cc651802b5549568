"""Traces of simulated steps as files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from tutti.layout import Layout
from tutti.planner.estimates.graph_clock import TraceEvent
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
