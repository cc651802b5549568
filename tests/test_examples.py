"""The examples, cut short: each way to start them that their docstrings give prints the same losses."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parent.parent
SECONDS = 110
SHORT = {
    "digits": "--epochs 1 --batch 240",
    "llama": "--steps 3 --batch 4 --layers 1",
    "gpt": "--steps 4 --every 2 --batch 4 --width 32 --depth 1 --out {out}",
}
# Its rank 0 is a fresh interpreter; all others are copies of one that has imported (forked.py). A fresh
# `tutti run` is in launch/test_launch.py.
FRESH = ("gpt", "torchrun --nproc-per-node 2 examples/gpt.py")
# Under torchrun all examples are the same to the library: one is played.
STOPPED = 'tutti run -n 2 --layout "data=2 zero=3" examples/gpt.py'  # played by the test of Ctrl-C


def ways(name: str) -> list[str]:
    """The commands of the docstring that train, each with its layout."""
    text = (ROOT / "examples" / f"{name}.py").read_text().split('"""')[1]
    found = [line.split("#")[0].strip() for line in text.splitlines()]
    return [w for w in found if w.startswith(("python ", "tutti run", "torchrun"))]


def command(way: str, out: Path) -> list[str]:
    """What an interpreter is given for `way`, with the example's options for a short run."""
    starters = {
        "python": [],
        "tutti": ["-m", "tutti"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    }
    first, *words = shlex.split(way)
    name = Path(words[-1]).stem
    return [*starters[first], *words, *shlex.split(SHORT[name].format(out=out))]


def play(way: str, out: Path, *, fresh: tuple[str, ...] = ()) -> str:
    """What rank 0 prints."""
    words, env = (
        command(way, out),
        os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    done = forked.run(words, env=env, cwd=ROOT, timeout=SECONDS, fresh=fresh)
    assert done.returncode == 0, f"{way}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(printed: str) -> list[str]:
    """All the losses and accuracies, as printed."""
    return re.findall(r"(?:loss|validation|accuracy) (\d+\.\d+)", printed)


def assert_same(found: list[str], expected: list[str]) -> None:
    """As many, and each within one of its last digit, over which rounding may carry it."""
    assert expected and len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        last = 10.0 ** -len(y.partition(".")[2])
        assert float(x) == pytest.approx(float(y), rel=0, abs=1.01 * last), (found, expected)


@pytest.mark.parametrize("name", SHORT)
def test_every_way_to_start_prints_the_same_losses(name: str, tmp_path: Path) -> None:
    first, *others = ways(name)
    assert first.startswith("python") and len(others) >= 3
    assert others[-1] == f"torchrun --nproc-per-node 2 examples/{name}.py"
    assert name != "gpt" or {STOPPED, FRESH[1]} <= {*others}
    expected = losses(play(first, tmp_path / "one"))
    played = others if name == "gpt" else others[:-1]
    for i, way in enumerate(way for way in played if way != STOPPED):
        fresh = ("0",) if (name, way) == FRESH else ()
        assert_same(losses(play(way, tmp_path / str(i), fresh=fresh)), expected)


def test_ctrl_c_then_resume_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Stopped under one layout, resumed under another; until then it prints the same losses."""
    steps = ["--steps", "40", "--every", "5"]
    one = "python examples/gpt.py"
    env = dict(os.environ)
    whole = forked.run(
        [*command(one, tmp_path / "whole"), *steps],
        env=env, cwd=ROOT, timeout=SECONDS,
    )  # fmt: skip
    stopped = forked.Forked(
        [*command(STOPPED, tmp_path / "part"), *steps],
        env=env, cwd=ROOT,
    )  # fmt: skip
    try:
        until = time.monotonic() + SECONDS / 2
        while not [*(tmp_path / "part").glob("step-*")]:
            assert time.monotonic() < until and stopped.poll() is None
            time.sleep(0.02)
        stopped.send_signal(signal.SIGINT)
        out, err = stopped.communicate(timeout=SECONDS / 2)
    finally:
        stopped.kill()
    assert stopped.returncode == 0, err
    found = re.search(r"stopped after step (\d+)", out)
    assert found and 5 <= int(found[1]) < 40, out
    expected = losses(whole.stdout)
    assert_same(losses(out), expected[: len(losses(out))])
    resumed = forked.run(
        [*command(one, tmp_path / "part"), *steps, "--resume"],
        env=env, cwd=ROOT, timeout=SECONDS,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert f"goes on after step {found[1]}" in resumed.stdout
    went_on = losses(resumed.stdout)
    assert_same(went_on, expected[-len(went_on) :])
    assert len(losses(out)) + len(went_on) == len(expected)
