"""Contracts of `torch_private/worker_signals.py`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch.utils.data import DataLoader

import forked
from tutti.torch_private.worker_signals import is_of_data_loader

SCRIPT = """\\
import signal
from torch.utils.data import DataLoader
from tutti.torch_private.worker_signals import is_of_data_loader

assert not is_of_data_loader(signal.getsignal(signal.SIGCHLD))
list(DataLoader([1, 2], num_workers=1, multiprocessing_context="fork"))
assert is_of_data_loader(signal.getsignal(signal.SIGCHLD))
print("recognized")
"""


def test_a_loader_with_workers_sets_a_handler_that_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = forked.run([str(path)], env=dict(os.environ), cwd=tmp_path, timeout=60)
    assert done.stdout.strip() == "recognized", done.stderr


def test_other_handlers_are_not() -> None:
    assert not is_of_data_loader(signal.SIG_DFL) and not is_of_data_loader(print)
    assert not is_of_data_loader(DataLoader)
