"""Matmuls of groups of rows (`grouped_mm`) as products by expert, for a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.graph.ops.expert_rows import expert_mm, expert_outer
from tutti.graph.ops.sorted_experts import grouped_rows_refused, sorted_experts
from tutti.user_lines import quoted, user_line


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten._grouped_mm`: rows times the weights of their group, or columns times the rows of each group."""
    if bias is not None:
        raise grouped_rows_refused(quoted(user_line()))
    if offs is None:
        made = torch.bmm(a, b)
    elif a.dim() == 2 and b.dim() == 3:
        experts = sorted_experts(offs, a.shape[0])
        made = expert_mm(a, b, experts, True, 1, 1)
    elif a.dim() == 2 and b.dim() == 2:
        experts = sorted_experts(offs, b.shape[0])
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
        made = expert_outer(a.t(), b, experts, shape, 1, 1)
    else:
        raise grouped_rows_refused(quoted(user_line()))
    return made if out_dtype is None else made.to(out_dtype)
