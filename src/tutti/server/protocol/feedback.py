"""Compressed gradients with error feedback: the rounding error goes with the next push.

    c = compress(g + e),  e <- g + e - c        (Seide et al., 2014; Karimireddy et al., 1901.09847)

The sum of all pushes is then the sum of the exact gradients less the last error. A worker keeps one error a
block for its own pushes; rows of a table travel uncompressed.
"""

from __future__ import annotations

from torch import Tensor

from tutti.comm.collectives.compression import COMPRESSIONS, NAMES, STEP
from tutti.errors import ServerError
from tutti.server.protocol.messages import TensorPart


class Feedback:
    """The errors of one worker's pushes.

    Args:
        compression: `fp32` (unchanged), `bf16` or `int8`.

    Raises:
        ServerError: there is no such compression.
    """

    def __init__(self, compression: str) -> None:
        if compression not in NAMES:
            raise ServerError(f'traffic "{compression}" is unknown', fix=", ".join(NAMES))
        self._compression = COMPRESSIONS.get(compression)
        self._errors: dict[int, Tensor] = {}

    def part(self, key: int, gradient: Tensor) -> TensorPart:
        """The gradient of a block in the format of messages."""
        if self._compression is None or not gradient.is_floating_point():
            return TensorPart(gradient)
        due = gradient + self._errors[key] if key in self._errors else gradient
        found = self._compression.compress(due)
        part = TensorPart(found[""], float(found[STEP]) if STEP in found else 1.0)
        self._errors[key] = due - part.plain(gradient.dtype)
        return part
