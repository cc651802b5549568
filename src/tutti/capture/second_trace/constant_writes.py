"""Refuses a step that writes into a constant of its trace, before the write."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from tutti.capture.second_trace.sharing import MemorySharing, Writers, written
from tutti.errors import CaptureError
from tutti.graph.edits.edit import source_of
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.user_lines import quoted


def refuse_real_write(node: fx.Node, root: Any) -> None:
    """Raise for a fresh node of a trace, before it runs, if it writes into a real tensor of `root`."""
    for x in written(node, {}):
        value = getattr(root, str(x.target), None) if x.op == "get_attr" else None
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            raise _refused(node)


def refuse_constant_writes(graph: fx.Graph, memory: MemorySharing, writers: Writers) -> None:
    """Raise for a step that changes a tensor that is neither state nor part of its batch."""
    constants = {memory.of(n) for n in graph.nodes if n.op == "get_attr"}
    for node in graph.nodes:
        if any(memory.of(x) in constants for x in written(node, writers)):
            raise _refused(node)


def _refused(node: fx.Node) -> CaptureError:
    return CaptureError(
        "the step changes a tensor that it was not given",
        at=quoted(source_of(node)),
        why="it would happen once, while the step is captured, and not at each call",
        fix="a buffer of the model, a tensor in a list or an attribute; or an argument of the step and a "
        "value that it returns",
    )
