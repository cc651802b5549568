"""The log of PyTorch's C++ code."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
_QUIET_PROFILER = ("KINETO_LOG_LEVEL", "99")  # which it reads at its first start
_LEVEL, _ERRORS_ONLY = "FLAGS_caffe2_log_level", 2


@contextlib.contextmanager
def native_warnings_off() -> Iterator[None]:
    """Context without warnings of PyTorch's C++ code, in all threads; without effect if it has no level.

    A profiler that starts for the first time inside does not tell its starts and ends, also later.
    Why: under the profiler of memory it warns of memory that was there before. Public: `TORCH_CPP_LOG_LEVEL`,
    which PyTorch reads once, and which would silence the whole run.
    """
    os.environ.setdefault(*_QUIET_PROFILER)
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(_LIBRARY)), _LEVEL)
    except (OSError, ValueError):
        yield
        return
    before = level.value
    level.value = max(before, _ERRORS_ONLY)
    try:
        yield
    finally:
        level.value = before
