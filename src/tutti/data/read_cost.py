"""Whether ranks that share a read gain by it: the time of a sample's read, and that of its bytes' way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from tutti.data.batch_frames import NotSendable, packed

# What one batch takes on its way from one rank to another: measured, see docs/concepts/data.md.
BATCH_SECONDS, BYTE_SECONDS = 200e-6, 0.35e-9
# Workers read beside the step, and the exchange is a part of the loop: the read must take so much longer.
TIMES = 8.0


@dataclass(frozen=True)
class SampleCost:
    """Of the first samples: seconds of a read, bytes of one in a batch; what no rank can send, if any."""

    seconds: float
    nbytes: int
    problem: str = ""


def sample_cost(sample: Any, seconds: float, *, stacked: bool) -> SampleCost:
    """The cost of a sample, which PyTorch's own function stacks or a user's joins with others."""
    try:
        said, parts = packed(default_collate([sample]) if stacked else sample)
    except NotSendable as found:  # what a user's function makes of it is not known yet
        return SampleCost(seconds, 0, str(found) if stacked else "")
    except Exception as error:  # the first batch tells it
        return SampleCost(seconds, 0, f"{type(error).__name__}: {error}" if stacked else "")
    nbytes = sum(x.numel() for _, x in parts)
    return SampleCost(seconds, nbytes + (0 if stacked else len(json.dumps(said))))


def pays(costs: Sequence[SampleCost], num_rows: int) -> bool:
    """Whether to share reads of `num_rows` samples; `costs` are those that the ranks have measured."""
    read = num_rows * min(x.seconds for x in costs)  # the others may have waited for a processor
    sent = BATCH_SECONDS + num_rows * max(x.nbytes for x in costs) * BYTE_SECONDS
    return read > TIMES * sent
