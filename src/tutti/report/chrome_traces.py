"""Simulated steps as Chrome traces, one file a rank, which Perfetto and HolisticTraceAnalysis read.

A kernel is an event of the category `kernel` on a stream, with a launch on the host that has the same
`correlation`; collectives and messages are kernels called `nccl...`, as the profiler names them on GPUs.
Events of one stream follow each other: messages to each pipeline rank have a stream of their own. Ranks with
the same coordinate along `pipe` run the same step, so one file stands for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import PlanError
from tutti.graph.text import SHORT
from tutti.layout import Layout
from tutti.planner.estimates.graph_clock import MESSAGE_STREAM, TraceEvent

STREAMS = {"device": 7, "inside": 20, "between": 24}
# The stream of messages to pipeline rank 0; those to the others follow.
_MESSAGES = 32
# Names of NCCL's kernels by the kind of a collective; of one that reduces with the operation and the dtype.
_NCCL = {
    "all_reduce": "ncclDevKernel_AllReduce_{reduction}_{dtype}_RING_LL",
    "all_gather": "ncclDevKernel_AllGather_RING_LL",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_{reduction}_{dtype}_RING_LL",
    "all_to_all": "ncclDevKernel_SendRecv",
    "send": "ncclDevKernel_SendRecv",
}
_HOST_THREAD = 1
_STEP = 0


def write_traces(
    events: Sequence[Sequence[TraceEvent]], layout: Layout, seconds: float, folder: Path
) -> list[Path]:
    """Write `rank-<rank>.json` for the first rank of each pipeline rank; returns the paths.

    Args:
        events: of each pipeline rank.
        layout: whose ranks they are.
        seconds: of the step.
        folder: made if missing.

    Raises:
        PlanError: the folder cannot be written.
    """
    per_stage = layout.num_ranks // len(events)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for pipe_rank, own in enumerate(events):
            rank = pipe_rank * per_stage
            whole = {
                "schemaVersion": 1,
                "distributedInfo": {
                    "rank": rank,
                    "world_size": layout.num_ranks,
                    "backend": "nccl",
                },
                "traceEvents": list(_trace(own, rank, seconds)),
            }
            paths.append(folder / f"rank-{rank}.json")
            paths[-1].write_text(json.dumps(whole))
    except OSError as error:
        raise PlanError(f"cannot write traces to {folder}", why=str(error.strerror)) from None
    return paths


def _trace(events: Sequence[TraceEvent], rank: int, seconds: float) -> Iterator[dict[str, Any]]:
    yield _named("process_name", rank, 0, f"rank {rank}")
    used = {one.stream for one in events}
    for stream in [*STREAMS, *sorted(used - STREAMS.keys())]:
        number = _number(stream)
        words = f"messages {stream}" if stream.startswith(MESSAGE_STREAM) else stream
        yield _named("thread_name", rank, number, f"stream {number} {words}")
    yield _event(f"ProfilerStep#{_STEP}", "user_annotation", 0.0, seconds, rank, _HOST_THREAD, {})
    for number, one in enumerate(sorted(events, key=lambda e: e.start), 1):
        # The host is ahead of the device: its launch ends where the kernel begins.
        launch = {"correlation": number, "cbid": 211}
        yield _event("cudaLaunchKernel", "cuda_runtime", one.start, 0.0, rank, _HOST_THREAD, launch)
        stream = _number(one.stream)
        shown: dict[str, Any] = {"stream": stream, "device": rank, "correlation": number}
        if one.source:
            shown["line"] = one.source
        if one.region:
            shown["region"] = one.region
        if one.nbytes:
            shown |= {"bytes": one.nbytes, "Group size": one.group}
        if one.dtypes:
            shown["dtype"] = _dtypes(one)
        yield _event(_kernel(one), "kernel", one.start, one.seconds, rank, stream, shown)


def _number(stream: str) -> int:
    if stream.startswith(MESSAGE_STREAM):
        return _MESSAGES + int(stream.removeprefix(MESSAGE_STREAM))
    return STREAMS[stream]


def _kernel(one: TraceEvent) -> str:
    """Its name as NCCL's, if it moves values between ranks; a message's action follows."""
    kind, _, action = one.name.partition(" ")
    if kind not in _NCCL:
        return one.name
    # A meeting of ranks moves nothing.
    words = {"reduction": one.reduction.capitalize() or "Sum", "dtype": _dtypes(one) or "u8"}
    return f"{_NCCL[kind].format(**words)} {action}".rstrip()


def _dtypes(one: TraceEvent) -> str:
    return "+".join(SHORT.get(dtype, str(dtype)) for dtype in one.dtypes)


def _event(
    name: str,
    category: str,
    start: float,
    seconds: float,
    pid: int,
    tid: int,
    shown: dict[str, Any],
) -> dict[str, Any]:
    # Both ends are whole nanoseconds: what ends where another event begins does so in the file, too.
    begin, end = round(1e6 * start, 3), round(1e6 * (start + seconds), 3)
    times = {"ts": begin, "dur": round(end - begin, 3)}
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        **times,
        "pid": pid,
        "tid": tid,
        "args": shown,
    }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
