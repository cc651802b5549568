"""A profile has every op of a call once, inside of the call, at the user's line, and changes no number."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks
from tutti.environment import PROFILE
from tutti.errors import TuttiError
from tutti.execution import profiling
from tutti.execution.profiling import IN_FLIGHT, NUM_CALLS, NUM_WARM, OPS

SLACK = 0.01  # microseconds of rounding


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A step of plain SGD."""
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def losses(layout: str, folder: str, shared_memory: str = "") -> list[float]:
    """Of the steps that a profile needs, in this process or on a rank."""
    with pytest.MonkeyPatch.context() as patch:
        if folder:
            patch.setenv(PROFILE.name, folder)
        if shared_memory:
            patch.setenv("TUTTI_SHARED_MEMORY", shared_memory)
        torch.manual_seed(0)
        layers = [one for _ in range(4) for one in (nn.Linear(16, 16), nn.Tanh())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = tutti.distribute(train, model, optimizer, layout)
        x = torch.linspace(-1, 1, 128).view(8, 16)
        return [step(x).item() for _ in range(NUM_WARM + NUM_CALLS)]


def events(file: Path) -> list[dict[str, Any]]:
    """The timed events of a trace."""
    return [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]


def end(event: dict[str, Any]) -> float:
    """Its end in microseconds."""
    return event["ts"] + event["dur"]


def check_nested(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every op lies within a call, and no two ops at once; the calls."""
    calls = [e for e in found if e["cat"] == "step"]
    ops = [e for e in found if e["tid"] == OPS and e["cat"] not in ("step", "micro-batch")]
    ops = sorted((e for e in ops if e["name"] != "micro-batches"), key=lambda e: e["ts"])
    for one, other in itertools.pairwise(ops):
        assert end(one) <= other["ts"] + SLACK, (one, other)
    for op in ops:
        inside = [c for c in calls if c["ts"] <= op["ts"] + SLACK and end(op) <= end(c) + SLACK]
        assert len(inside) == 1, op
    return calls


def test_on_one_device(tmp_path: Path) -> None:
    assert losses("", str(tmp_path)) == losses("", "")
    found = events(tmp_path / "rank-0.json")
    calls = check_nested(found)
    assert [c["args"]["step"] for c in calls] == [NUM_WARM + k for k in range(NUM_CALLS)]
    names = Counter(e["name"] for e in found)
    matmuls = sum(
        n for name, n in names.items() if "mm" in name or "matmul" in name or name == "linear"
    )
    assert matmuls == 11 * NUM_CALLS, names  # four forward, seven backward: none of the input
    lines = {e["args"]["line"].rpartition(":")[0] for e in found if e["cat"] != "step"}
    assert lines == {__file__}
    assert {e["args"]["region"] for e in found if e["cat"] != "step"} >= {"forward", "backward"}


def test_no_clock_is_read_without_a_profile() -> None:
    losses("", "")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.distribute(train, model, optimizer, "")
    step(torch.ones(2, 4))
    assert step._last is not None
    assert profiling.now.__name__ not in step._last.execution.generated.text
    assert "mark(" not in step._last.execution.generated.text


def test_collectives_have_their_axes_and_bytes(ranks: Ranks, tmp_path: Path) -> None:
    alone = losses("", "")
    for found in ranks.run(losses, "data=2 zero=3", str(tmp_path), "off", n=2):
        assert found == pytest.approx(alone, rel=1e-6)
    for rank in range(2):
        every = events(tmp_path / f"rank-{rank}.json")
        check_nested(every)
        moved = [e for e in every if e["cat"] == "collective" and "axes" in e["args"]]
        assert moved and all(e["args"]["axes"] == "data" for e in moved)
        flying = Counter(e["name"] for e in every if e["tid"] == IN_FLIGHT)
        waits = Counter(
            e["name"].removeprefix("wait for ") for e in every if "wait for" in e["name"]
        )
        assert flying == waits and flying["reduce_scatter"] == NUM_CALLS
        scattered = [e for e in moved if e["name"].endswith("reduce_scatter")]
        assert {e["args"]["nbytes"] for e in scattered} == {4 * 4 * (16 * 16 + 16)}


def test_micro_batches_and_messages_of_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    alone = losses("", "")
    for found in ranks.run(losses, "pipe=2 micro=2", str(tmp_path), n=2):
        assert found == pytest.approx(alone, rel=1e-6)
    for rank, others in ((0, {"send F0 to stage 1", "receive B0 from stage 1"}),
                         (1, {"receive F1 from stage 0", "send B1 to stage 0"})):  # fmt: skip
        every = events(tmp_path / f"rank-{rank}.json")
        calls = check_nested(every)
        parts = Counter(e["name"] for e in every if e["cat"] == "micro-batch")
        expected = {f"{rank}{kind}{micro}" for kind in "FB" for micro in range(2)}
        assert parts.keys() >= expected and all(parts[k] == len(calls) for k in expected), parts
        assert others <= {e["name"] for e in every if e["cat"] == "collective"}


def test_a_folder_keeps_files_of_others_and_loses_earlier_traces(tmp_path: Path) -> None:
    for name in ("rank-3.json", "worker-1.0.json", "notes.json", "rank-x.json"):
        (tmp_path / name).write_text("{}")
    profiling.check_folder(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.json", "rank-x.json"]
    (tmp_path / "file").touch()
    with pytest.raises(TuttiError, match="no trace can be written"):
        profiling.check_folder(tmp_path / "file" / "traces")
