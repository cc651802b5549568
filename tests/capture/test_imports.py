"""What a first step costs every process beside the capture itself."""

from __future__ import annotations

import os
from pathlib import Path

import forked

SCRIPT = Path(__file__).parent / "few_imports.py"


def test_a_capture_imports_neither_a_compiler_nor_an_exporter() -> None:
    done = forked.run([SCRIPT], env=dict(os.environ), cwd=Path.cwd(), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["before", "after"]
