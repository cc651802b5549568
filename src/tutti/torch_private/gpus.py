"""What runs when CUDA starts in a process."""

from collections.abc import Callable
from typing import Any

import torch

# `when_cuda_starts(call)`: calls once CUDA is initialized, or now if it is.
# Why: a rank chooses its GPU before the script of the user starts CUDA, and without starting it itself.
# Public: none.
when_cuda_starts: Callable[[Callable[[], Any]], None] = torch.cuda._lazy_call
