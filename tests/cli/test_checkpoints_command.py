"""`tutti checkpoints`: what it lists, checks and removes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from resuming.small_run import SmallRun
from tutti.cli.main import app


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Steps 2, 4, 6, 8, of which 4 is the best."""
    run = SmallRun(tmp_path / "run", every=2, keep=None, keep_best="score")
    for count in range(1, 9):
        run.step(torch.randn(12, 8), torch.randn(12, 4))
        run.checkpoints.tick(score=abs(count - 4.0))
    run.checkpoints.close()
    del run
    yield tmp_path / "run"


def listed(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoints", *words])
    return result.exit_code, result.stdout


def test_saved_steps_are_listed(folder: Path) -> None:
    code, text = listed(str(folder))
    assert code == 0
    head, *rows = text.splitlines()
    assert head.split() == ["step", "saved", "size", "layout", "metrics", "state"]
    assert [row.split()[0] for row in rows] == ["2", "4", "6", "8"]
    assert all("kB  one device  score=" in row for row in rows)
    assert [row.endswith("whole, best") for row in rows] == [False, True, False, False]
    assert listed(str(folder), "--check")[1].count("whole, checksums right") == 4


def test_damage_is_found_by_a_check(folder: Path) -> None:
    (data,) = (folder / "step-00000006").glob("state-*/*.distcp")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert listed(str(folder))[0] == 0  # sizes alone
    code, text = listed(str(folder), "--check", "--json")
    found = json.loads(text)
    assert code == 1 and [one["whole"] for one in found] == [True, True, False, True]
    assert "checksum" in found[2]["damage"] and data.name in found[2]["damage"]
    assert [one["best"] for one in found] == [False, True, False, False]
    data.unlink()
    code, text = listed(str(folder))
    assert code == 1 and f"damaged: {data.name} has no bytes" in text


def test_a_damaged_index_of_plain_pytorch_is_found(folder: Path) -> None:
    index = folder / "step-00000006" / ".metadata"
    index.write_bytes(index.read_bytes()[:100])
    code, text = listed(str(folder))
    assert (
        code == 1 and text.count("whole for tutti; the index of torch.distributed.checkpoint") == 1
    )
    code, text = listed(str(folder), "--check", "--json")
    found = json.loads(text)
    assert code == 1 and all(one["whole"] for one in found)
    assert ".metadata has 100 bytes of" in found[2]["index_damage"]


def test_prune_keeps_the_newest_and_the_best(folder: Path) -> None:
    (folder / ".step-00000009.new").mkdir()
    code, text = listed(str(folder), "--prune", "1", "--json")
    assert code == 0 and [one["step"] for one in json.loads(text)] == [4, 8]
    assert {p.name for p in folder.iterdir()} == {"lock", "step-00000004", "step-00000008"}


def test_prune_refuses_the_folder_of_a_run(folder: Path) -> None:
    run = SmallRun(folder)
    run.checkpoints.restore()
    with run.checkpoints:
        run.one()
        pid = os.fork()
        if not pid:
            os._exit(listed(str(folder), "--prune", "1")[0])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert len(list(folder.glob("step-*"))) == 4


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert listed(str(tmp_path)) == (0, "step  saved  size  layout  metrics  state\n")
    assert listed(str(tmp_path), "--json") == (0, "[]\n")
    assert listed(str(tmp_path / "no"))[0] == 2
