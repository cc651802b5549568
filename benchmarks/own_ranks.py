"""Starts the file of a benchmark again, on ranks of one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def start_ranks(file: str, *words: str, layout: str) -> None:
    """Play `file` with arguments on the ranks of `layout`; `RANK` is set there. Raises if it fails."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.getenv("PYTHONPATH")]))
    command = [sys.executable, "-m", "tutti", "run", "--layout", layout, file, *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run(command, check=True, env=env)  # our own files and words
