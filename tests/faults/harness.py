"""Starts a run under any layout, breaks something at a random moment, and looks for what is promised.

All of it follows from a seed, but for the moment, which follows from the run's own progress:

    run `tutti run train.py` -> wait for a step -> inject a fault -> wait for the end
    -> flip a bit of the checkpoint (sometimes) -> resume on one device to the last step
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import tutti
from captured_once import captured_once
from faults import train
from faults.injected import FAULTS, Fault, apart, flip_a_bit, holds_checkpoint
from forked import Forked
from launch.processes import lives
from tutti.checkpoint.files import Reading
from tutti.checkpoint.unanimous import Unanimous
from tutti.errors import CheckpointError

LAYOUTS = (
    "data=2",
    "data=2 zero=3",
    "tensor=2",
    "pipe=2 micro=2",
    "replica=2 sync=diloco(every=2)",
    "replica=2 server=1 sync=async",
    "replica=2 server=1 sync=step",
)
STEPS = 16
START_SECONDS, RUN_SECONDS, LEFT_SECONDS = 90.0, 120.0, 20.0
# Long enough for a rank that a busy machine keeps waiting.
SHORT_TIMEOUT, LONG_TIMEOUT = "12", "90"
_SCRIPT = Path(train.__file__)


class BrokenPromise(AssertionError):
    """What a run did that it may not; with all that it has printed."""

    def __init__(self, run: Played, promise: str) -> None:
        self.layout, self.fault = run.layout, run.fault.name
        said = "\n".join(run.said)
        where = f"{self.fault} ({run.hit}) under {self.layout}"
        super().__init__(f"seed {run.seed}: {promise}\n  {where}\n{said}")


@dataclass
class Played:
    """One run, and what became of it."""

    seed: int
    layout: str
    fault: Fault
    directory: Path
    launcher: int = 0
    hit: str = ""
    said: list[str] = field(default_factory=list)

    def ranks(self) -> dict[str, int]:
        """Process numbers by name."""
        return {n: p for n, p in self._pids().items() if not n.startswith("server")}

    def servers(self) -> dict[str, int]:
        """The same of servers."""
        return {n: p for n, p in self._pids().items() if n.startswith("server")}

    def _pids(self) -> dict[str, int]:
        return {f.stem: int(f.read_text()) for f in self.directory.glob("*.pid") if f.read_text()}

    def step(self) -> int:
        """How far the run is."""
        return max((int(f.read_text()) for f in self.directory.glob("*.step")), default=0)

    def require(self, holds: bool, promise: str) -> None:
        """Raise unless what is promised holds."""
        if not holds:
            raise BrokenPromise(self, promise)


def play(seed: int, directory: Path, layout: str = "", fault: str = "") -> Played:
    """One run with one fault, both chosen by the seed where they are not given.

    Raises:
        BrokenPromise: something was not as `docs/promises.md` says.
    """
    chooses = random.Random(seed)
    layout = layout or chooses.choice(LAYOUTS)
    fitting = [f for f in FAULTS.values() if f.fits(layout)]
    chosen = FAULTS[fault] if fault else chooses.choice(fitting)
    played = Played(seed, layout, chosen, directory)
    directory.mkdir(parents=True)
    (directory / "tmp").mkdir()
    process = _start(played)
    try:
        _break(played, process, chooses)
        out, err = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        raise BrokenPromise(played, f"it does not end within {RUN_SECONDS:g} s") from None
    finally:
        process.kill()
    played.said += [out, err]
    _check_end(played, process.returncode, err)
    _check_left(played)
    _check_checkpoint(played, chooses)
    shutil.rmtree(directory)
    return played


def _start(played: Played) -> Forked:
    words = ["-m", "tutti", "run", "--layout", played.layout]
    words += [str(_SCRIPT), str(played.directory), str(STEPS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(played.directory / "tmp")}
    env["TUTTI_TIMEOUT"] = SHORT_TIMEOUT if played.fault.short_timeout else LONG_TIMEOUT
    env["TUTTI_LEASE"] = SHORT_TIMEOUT
    process = Forked(words, env=env, cwd=Path.cwd())
    assert process.pid is not None
    played.launcher = process.pid
    return process


def _break(played: Played, process: Forked, chooses: random.Random) -> None:
    """Wait for a random step, and a little longer; then inject the fault."""
    until, due = time.monotonic() + START_SECONDS, chooses.randrange(1, STEPS - 4)
    while played.step() < due and time.monotonic() < until:
        played.require(process.poll() is None, "it ended before anything was wrong")
        time.sleep(0.005)
    time.sleep(chooses.uniform(0.0, 0.05))
    try:
        played.hit = played.fault.inject(played, chooses)
    except ProcessLookupError:
        played.hit = "nobody: all had ended"


def _check_end(played: Played, code: int | None, err: str) -> None:
    """The exit code, and the first line of the report."""
    if played.hit.startswith("nobody"):
        return
    ends = played.fault.ends(played.layout, played.hit)
    played.require(code in ends.codes, f"it ended with {code}, not with one of {ends.codes}")
    if code == 0 or not ends.line:
        return
    notes = re.compile(
        r"replica \d (is lost|has left)|server \d|rank \d has waited |step .* measured|.*Warning: |  |$"
    )
    first = next((line for line in err.splitlines() if not notes.match(line)), "")
    played.require(re.match(ends.line, first) is not None, f"its report begins {first!r}")
    played.require("unexpected pos" not in err and "KeyError" not in err, "a raw error")


def _check_left(played: Played) -> None:
    """No process, and no folder of the run."""
    pids, tmp = list(played._pids().values()), played.directory / "tmp"
    until = time.monotonic() + LEFT_SECONDS
    while time.monotonic() < until:
        living, left = [p for p in pids if lives(p)], list(tmp.glob("tutti-*"))
        if not living and not left:
            return
        time.sleep(0.05)
    played.require(not living, f"processes {living} still live")
    played.require(not left, f"{[f.name for f in left]} are left")


def _check_checkpoint(played: Played, chooses: random.Random) -> None:
    """Whole, as new as the last save that was said, and the run goes on from it to the same end."""
    folder, saved = played.directory / "checkpoint", played.directory / "saved"
    acknowledged = int(saved.read_text()) if saved.exists() else 0
    if not holds_checkpoint(played.directory):
        played.require(not acknowledged, f"the save of step {acknowledged} is gone")
        return
    try:
        reading = Reading(folder, Unanimous(None))
        reading.check()
    except CheckpointError as error:
        raise BrokenPromise(played, f"its checkpoint is not whole: {error.what}") from error
    losses = reading.manifest.extra["losses"]
    played.require(len(losses) >= acknowledged, f"it holds {len(losses)} of {acknowledged} steps")
    flipped = flip_a_bit(played.directory, chooses) if chooses.random() < 0.3 else ""
    try:
        found = resumed(folder)
    except CheckpointError:
        played.require(bool(flipped), "its checkpoint is refused")
        return
    if apart(played.layout):
        played.require(len(found) == STEPS and max(found) < 10.0, "it does not go on")
        return
    expected = undisturbed()
    same = all(abs(a - b) <= 1e-10 * abs(b) for a, b in zip(found, expected, strict=True))
    played.require(same, f"it goes on with other losses ({flipped or 'no bit flipped'})")


def resumed(folder: Path) -> list[float]:
    """The losses of all steps: from the checkpoint, then on one device to the end."""
    step = tutti.distribute(train.train_step, *train.make())
    losses = step.load(folder)["losses"]
    with captured_once("faults"):
        while step.num_steps < STEPS:
            losses.append(step(*train.batch_at(step.num_steps)).item())
    return losses


@cache
def undisturbed() -> tuple[float, ...]:
    """The losses of one device."""
    step = tutti.distribute(train.train_step, *train.make())
    return tuple(step(*train.batch_at(k)).item() for k in range(STEPS))
