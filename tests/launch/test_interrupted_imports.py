"""Ctrl-C while a rank imports ends it soon, without a traceback of what it imported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tutti.environment import RUN_DIR

INTERRUPT = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT)\n"
# As code that tries a module, and can do without it.
SWALLOWED = f"try:\n    {INTERRUPT}    time.sleep(1)\nexcept BaseException: pass\n"
RUN_SECONDS = 60.0


def ended(script: str, folder: Path, run_dir: Path | None = None) -> tuple[int, str]:
    """The exit code of a rank, and what it says. Ctrl-C is not ignored, whatever runs the tests does."""
    (folder / "train.py").write_text(script)
    words = [sys.executable, "-m", "tutti.launch.worker", str(folder / "train.py")]
    environment = {**os.environ, "RANK": "0", RUN_DIR.name: str(run_dir or folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    heeding = ["env", "--default-signal=INT", *words]
    done = subprocess.run(
        heeding, env=environment, stderr=subprocess.PIPE, text=True, timeout=RUN_SECONDS
    )
    return done.returncode, done.stderr


def test_before_the_script(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(INTERRUPT)
    assert ended("", tmp_path) == (-2, "")


def test_in_an_import_of_the_script_that_drops_the_interrupt(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"{SWALLOWED}time.sleep({RUN_SECONDS})\n")
    assert ended("import slow", tmp_path) == (130, "")


def test_a_script_that_has_asked_for_its_ranks_may_save_after_it(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text("import time\ntime.sleep(3)\n")
    begin = "from tutti.launch.ranks import ensure_process_group\nensure_process_group()\n"
    script = f"{begin}{SWALLOWED}import saving, sys\nprint('saved', file=sys.stderr)"
    assert ended(script, tmp_path) == (0, "saved\n")


def test_a_rank_that_starts_after_the_end_of_its_launcher(tmp_path: Path) -> None:
    began = time.monotonic()
    code, said = ended(f"import time; time.sleep({RUN_SECONDS})", tmp_path, tmp_path / "gone")
    assert (code, said) == (130, "")
    assert time.monotonic() - began < RUN_SECONDS
