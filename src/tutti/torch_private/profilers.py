"""Whether PyTorch's profiler is in use."""

from __future__ import annotations

from torch.autograd import (
    _profiler_enabled,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.autograd.profiler import KinetoStepTracker

_OF_A_SCHEDULE = "ProfilerStep"


def profiler_is_used() -> bool:
    """Whether a profiler is on in this process, or a `torch.profiler.profile` waits for its turn to begin.

    Why: a second profiler ends the first one, whose events are lost. Public: none.
    """
    return _profiler_enabled() or _OF_A_SCHEDULE in KinetoStepTracker._step_dict
