"""`torch.inference_mode()` in a step, as it counts in a trace: without gradients.

A tensor made in it has no count of writes, and PyTorch's tracers cannot take views of one.
"""

from __future__ import annotations

from typing import Any

import torch

from tutti.capture.patch_table import INFERENCE_MODE

_HELD = "_tutti_grad_mode"


def _enter(mode: Any) -> None:
    setattr(mode, _HELD, torch.set_grad_enabled(not mode.mode))


def _exit(mode: Any, *raised: Any) -> None:
    getattr(mode, _HELD).__exit__(*raised)


FUNCTIONS = tuple(zip(INFERENCE_MODE.values(), (_enter, _exit), strict=True))
