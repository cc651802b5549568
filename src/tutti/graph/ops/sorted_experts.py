"""The groups of rows that follow each other, as `grouped_mm` takes them.

    tutti::sorted_experts(ends, num_rows) -> the group of each row: the number of ends at or before it

The rows of a group follow each other, and `ends` holds the end of each group. `capture.spelling.sorted_rows`
replaces this op if it knows the index by which the step has sorted the rows; no program has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.errors import CaptureError

_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_LIBRARY.define("sorted_experts(Tensor ends, SymInt num_rows) -> Tensor")


def _sorted_experts(ends: Tensor, num_rows: int) -> Tensor:
    rows = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, rows, right=True)


def _fake(ends: Tensor, num_rows: int) -> Tensor:
    return ends.new_empty((num_rows,), dtype=torch.int64)


_LIBRARY.impl("sorted_experts", _sorted_experts, "CompositeExplicitAutograd")
torch.library.register_fake("tutti::sorted_experts", _fake, lib=_LIBRARY)
sorted_experts = torch.ops.tutti.sorted_experts.default


def grouped_rows_refused(at: str) -> CaptureError:
    """The error of a matmul of groups of rows in no known order."""
    return CaptureError(
        "the step multiplies groups of rows whose sizes depend on values",
        at=at,
        why="ranks split rows of a known order only: of one `sort` of their experts, which the step undoes",
        fix="a matmul for each row with weights picked by index; of a model of Hugging Face: "
        'model.set_experts_implementation("batched_mm")',
    )
