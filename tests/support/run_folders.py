"""Folders of runs as `tutti run --report` leaves them, written without a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_765_000_000.0


def write_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """A file of records."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(r) + "\n" for r in records))


def begin(name: str = "rank 0", *, at: float = BEGAN, **more: Any) -> dict[str, Any]:
    """The first line of a process."""
    return {
        "kind": "begin", "time": at, "name": name, "argv": ["train.py"], "host": "h", "world_size": 1,
        "processors": 2, "threads": 1, "platform": "p", "versions": {"torch": "2"}, **more,
    }  # fmt: skip


def step(function: str = "train_step", model: str = "GPT", **more: Any) -> dict[str, Any]:
    """The record of a step."""
    return {
        "kind": "step", "of": 1, "function": function, "line": "train.py:7", "model": model,
        "optimizers": ["AdamW"], "num_parameters": 1234, "layout": "data=2 tensor=2", "device": "cpu", **more,
    }  # fmt: skip


def points(
    count: int, names: Sequence[str] = ("loss",), first: int = 1, **values: float
) -> dict[str, Any]:
    """Points of steps with a falling loss, or with one value at each step."""
    rows = []
    for k in range(first, first + count):
        scalars = [values.get(n, 2.0 + math.cos(k / 9) / 9 + 3 / k) for n in names]
        rows.append([k, 0.02 * k, 0.0123 + 0.001 * math.sin(k), *scalars])
    return {"kind": "steps", "time": BEGAN, "of": 1, "names": list(names), "points": rows}


def tensor(name: str, kind: str = "parameter", owner: str = "", **more: Any) -> dict[str, Any]:
    """A tensor of the facts of a program."""
    return {
        "name": name, "kind": kind, "owner": owner, "dtype": "f32", "shape": [512, 2048],
        "stored": "tensor+data, -", "computed": "tensor, -", "axes": [["tensor", "data"], []],
        "nbytes": 1_048_576, "whole_nbytes": 4_194_304, "pipe": None, "reason": "", **more,
    }  # fmt: skip


def state_of_layers(num_layers: int, tensors_of_layer: int = 12) -> list[dict[str, Any]]:
    """The state of a model of equal layers under Adam."""
    found = []
    for layer in range(num_layers):
        for k in range(tensors_of_layer):
            name = f"model.decoder.layers.{layer}.self_attention.projection_{k}.weight"
            found.append(tensor(name))
            for slot in ("step", "exp_avg", "exp_avg_sq"):
                found.append(tensor(f"optim.{name}.{slot}", "slot", name))
    return found


def memory(num_positions: int = 400, line: str = "model.py:12") -> dict[str, Any]:
    """The memory of a program, as `memory_course.memory_facts` gives it."""
    regions = ("forward", "backward", "update")
    course = [
        [
            regions[3 * k // num_positions],
            5_000_000 + 10_000 * min(k, num_positions - k),
            "mm",
            line,
        ]
        for k in range(num_positions)
    ]
    return {
        "peak_nbytes": 8_000_000, "call_nbytes": 3_000_000, "state_nbytes": 5_000_000,
        "gradient_nbytes": 500_000, "activation_nbytes": 2_000_000, "other_nbytes": 500_000,
        "op": "mm", "region": "backward", "source": line, "budget_nbytes": None, "course": course,
        "largest": [{"name": "mm", "shape": [8, 8], "nbytes": 99, "kind": "activation", "source": line}],
    }  # fmt: skip


def collective(line: str, **more: Any) -> dict[str, Any]:
    """A row of collectives."""
    return {
        "pipe": 0, "line": line, "region": "forward", "kind": "all_reduce", "dtype": "f32",
        "over": "tensor", "cause": "for add of blocks.0", "count": 3, "nbytes": 4096, **more,
    }  # fmt: skip


def facts(tensors: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """The facts of a program."""
    return {
        "layout": "data=2 tensor=2", "mesh": [["data", 2], ["tensor", 2]], "tensors": list(tensors),
        "batch": [], "collectives": [collective("model.py:12")], "pipeline": None, "fallbacks": [],
        "seconds": None, "memory": memory(), **more,
    }  # fmt: skip


def program(shown: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The record of a program with its facts."""
    return {
        "kind": "program", "time": BEGAN + 1, "of": 1, "number": 1, "step": 1, "why": "", "seconds": 1.5,
        "facts": shown, **more,
    }  # fmt: skip


def small_run(folder: Path) -> Path:
    """A run of two layers and 30 steps that ended well."""
    records = [begin(), step(), program(facts(state_of_layers(2))), points(30)]
    ends = [{"kind": "end", "time": BEGAN + 9}]
    write_lines(folder / "rank-0.jsonl", [*records, *ends])
    return folder


def large_run(folder: Path) -> Path:
    """5,000 steps of a model of 32 layers on four ranks, with many lines of collectives and events."""
    moved = [collective(f"model.py:{k}", cause=f"for add of blocks.{k}") for k in range(400)]
    nans = [
        {"kind": "nan", "time": BEGAN + k, "of": 1, "step": k, "name": "loss", "value": "nan"}
        for k in range(3000)
    ]
    shown = facts(state_of_layers(32), collectives=moved)
    first = [begin(world_size=4), step(), program(shown), points(5000, ("loss", "accuracy"))]
    write_lines(folder / "rank-0.jsonl", [*first, *nans, {"kind": "end", "time": BEGAN + 9}])
    for rank in range(1, 4):
        more = [begin(f"rank {rank}", world_size=4), step(), points(5000, ("loss", "accuracy"))]
        write_lines(folder / f"rank-{rank}.jsonl", more)
    return folder


def trace(folder: Path, rank: int, num_ops: int = 6000) -> None:
    """A rank's trace of one call."""
    kinds = ("forward", "backward", "update", "collective")
    events: list[dict[str, Any]] = [
        {"ph": "X", "tid": 0, "name": "step 3, program 1", "cat": "step", "ts": 5.0 + rank,
         "dur": 9.0 * num_ops, "args": {"step": 3, "program": 1}}
    ]  # fmt: skip
    for k in range(num_ops):
        shown = {"line": f"/home/me/model.py:{k % 90}"}
        name = "all_reduce" if kinds[k % 4] == "collective" else "mm"
        place = {"ph": "X", "tid": 0, "name": name, "cat": kinds[k % 4], "args": shown}
        events.append({**place, "ts": 5.0 + rank + 9.0 * k, "dur": 7.0})
    (folder / f"rank-{rank}.json").write_text(json.dumps({"traceEvents": events}))
