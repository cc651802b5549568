"""State of a step outside of its model and optimizers: tensors in closures, criteria, teachers.

Every rank has all of it, and makes the same changes.
"""

from __future__ import annotations

from torch import Tensor

from tutti.calls.python_values import PythonValues
from tutti.capture.captured import Captured
from tutti.capture.python.held_values import TableEntry
from tutti.capture.python.outside import is_dense
from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.exchange import broadcast_first
from tutti.layout import Layout


class Outside:
    """The tensors outside that one program reads, in its order."""

    def __init__(self, captured: Captured, values: PythonValues) -> None:
        self._captured, self._values = captured, values
        self._state = values.state
        self._entries = self._found()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def _found(self) -> list[TableEntry]:
        return [self._state.entry_like(p) for p in self._captured.outside.values()]

    def tensors(self) -> list[Tensor]:
        """The current tensors; a copy of a view of another tensor, which no step writes."""
        if self._values.state is not self._state:
            self._state = self._values.state
            self._entries = self._found()
        found = [entry.get() for entry in self._entries]
        return [x if is_dense(x) else x.contiguous() for x in found]

    def agree(self, layout: Layout) -> None:
        """Broadcast rank 0's values; all ranks call this together."""
        if not self._entries or layout.num_ranks == 1:
            return
        found = dict(zip(self._captured.outside, self.tensors(), strict=True))
        check_order([f"state {n}: {list(x.shape)} {x.dtype}" for n, x in found.items()])
        for x in found.values():
            # A message between stages is contiguous, so ranks may have other strides.
            own, sent = x.detach(), x.detach().contiguous()
            broadcast_first(sent)
            if sent.data_ptr() != own.data_ptr():
                own.copy_(sent)
