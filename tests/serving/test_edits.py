"""What a script does besides its step in a run with servers: numbers as on one device, or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from tutti.errors import ServerError
from tutti.server.split.small_sums import SmallSums

SCRIPT = Path(__file__).parent / "editing_script.py"


def run(directory: Path, layout: str, how: str) -> subprocess.CompletedProcess[str]:
    return run_script(SCRIPT, directory, layout, how)


def run_script(
    script: Path, directory: Path, layout: str, how: str
) -> subprocess.CompletedProcess[str]:
    """A run of `script`, or without a layout one process of it, which writes DIRECTORY/found."""
    words = ["-m", "tutti", "run", "--layout", layout] if layout else []
    words += [str(script), str(directory / "found"), how]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "60"}
    return forked.run(words, env=env, cwd=directory, timeout=120)


def found(directory: Path, layout: str, how: str) -> Any:
    done = run(directory, layout, how)
    assert done.returncode == 0, done.stderr
    return json.loads((directory / "found").read_text())


@pytest.mark.parametrize(
    ("how", "axes"),
    [
        ("nothing", "data=2"),
        ("whole", ""),
        ("whole", "tensor=2"),
        ("data", ""),
        ("loads", ""),
        ("distills", ""),
    ],
)
def test_numbers_are_those_of_one_device(how: str, axes: str, tmp_path: Path) -> None:
    losses, weights = found(tmp_path, f"replica=2 {axes} server=1 sync=step", how)
    expected_losses, expected = found(tmp_path, "", how)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert weights.keys() == expected.keys()
    for name, x in expected.items():
        assert weights[name] == pytest.approx(x, rel=1e-11), name


@pytest.mark.parametrize(
    ("layout", "how", "said"),
    [
        ("sync=step", "alone", "one worker alone has changed weights between two calls"),
        ("sync=async", "data", 'the script has changed "out.weight" between two calls'),
        ("sync=step", "slots", "servers keep the slots of the optimizer"),
    ],
)
def test_what_servers_cannot_take_over_is_refused(
    layout: str, how: str, said: str, tmp_path: Path
) -> None:
    done = run(tmp_path, f"replica=2 server=1 {layout}", how)
    assert done.returncode != 0 and said in done.stderr


def test_small_sums_of_complex_numbers_and_large_integers() -> None:
    """Two workers with the same values."""
    sums = SmallSums(lambda _, values: values * 2, 0, 2)
    x = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    y = torch.tensor([[5.0, 6.0, 7.0]])
    twice_y, twice_x = sums.reduced([y, x.conj()], (), "sum")
    assert torch.equal(twice_x, 2 * x.conj().resolve_conj()) and torch.equal(twice_y, 2 * y)
    assert torch.equal(sums.gathered([x], ())[0][0], 2 * x)
    with pytest.raises(ServerError, match="above 2"):
        sums.reduced([torch.tensor([2**53 + 1])], (), "sum")
