"""Single rows of a table, which travel without the rest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tutti.server.protocol.keys import VariableBlock
from tutti.server.protocol.messages import TensorPart


@dataclass(frozen=True)
class Rows:
    """Rows of a table: their numbers (i64, ascending, each once), and a tensor with a row for each."""

    rows: Tensor
    values: Tensor


def whole(x: Tensor) -> Tensor:
    """A tensor ready to cut and send: contiguous, in host memory."""
    return x.detach().cpu().contiguous()


def own_rows(block: VariableBlock, rows: Tensor) -> Tensor:
    """The `rows` in a block, counted from its first."""
    return rows[inside(block, rows)] - block.start


def inside(block: VariableBlock, rows: Tensor) -> Tensor:
    """A mask of the `rows` in a block."""
    return (rows >= block.start) & (rows < block.stop)


def rows_of(block: VariableBlock, x: Rows) -> TensorPart | None:
    """A block's part of a gradient by rows; None if it has no rows."""
    mine = inside(block, x.rows)
    if not mine.any():
        return None
    return TensorPart(whole(x.values)[mine], rows=(x.rows[mine] - block.start).contiguous())
