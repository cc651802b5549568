"""Values that a step writes in Python in a run with servers: logs, meters, the last loss."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forked
from serving import logging_script as script

SCRIPT = Path(script.__file__)


def played(directory: Path, layout: str, kind: str) -> list[Any]:
    """What each worker has found."""
    words = ["-m", "tutti", "run", "--layout", layout, str(SCRIPT), str(directory), kind]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "60"}
    done = forked.run(words, env=env, cwd=directory, timeout=120)
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("worker*.json"))]
    assert found, done.stderr
    return found


def close(found: Any, expected: Any) -> bool:
    """Whether two values are equal, numbers to rounding."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(close(found[k], expected[k]) for k in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(found, float):
        return found == pytest.approx(expected, rel=1e-9)
    return found == expected and type(found) is type(expected)


@pytest.mark.parametrize("servers", [1, 2])
def test_logs_are_those_of_one_device_under_step(servers: int, tmp_path: Path) -> None:
    expected = script.run(partial(script.logs, *script.made()))
    for found in played(tmp_path, f"replica=2 server={servers} sync=step", "logs"):
        assert close(found, expected), (found, expected)


@pytest.mark.parametrize("sync", ["async", "bounded(1)"])
def test_each_worker_logs_the_values_of_its_own_rows_where_they_are_apart(
    sync: str, tmp_path: Path
) -> None:
    one, other = played(tmp_path, f"replica=2 server=1 sync={sync}", "logs")
    for found in (one, other):
        losses = [loss for loss, *_ in found]
        for k, (loss, log, recent, meter) in enumerate(found):
            assert log["loss"] == recent["loss"] == meter["last"] == pytest.approx(loss, rel=1e-12)
            assert log["all"] == pytest.approx(losses[: k + 1], rel=1e-12)
            assert meter["total"] == pytest.approx(4 * sum(losses[: k + 1]), rel=1e-12)
            assert meter["count"] == 4 * (k + 1) and log["norm"] > 0 and recent["kind"] == "train"
    assert one[0][0] != other[0][0]


@pytest.mark.parametrize("sync", ["step", "async"])
@pytest.mark.parametrize(
    ("kind", "line"),
    [("reads", '1 + 0.1 * log.get("loss", 0.0)'), ("decides", "")],
)
def test_a_value_that_the_next_call_reads_is_refused(
    kind: str, line: str, sync: str, tmp_path: Path
) -> None:
    for said in played(tmp_path, f"replica=2 server=1 sync={sync}", kind):
        assert said.startswith("CaptureError: the step reads log['loss'], which its last call"), (
            said
        )
        assert line in said
