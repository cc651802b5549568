"""The refusal of a step whose forward has fewer ops with work than stages: what in it leaves so few."""

from __future__ import annotations

from torch import fx

from tutti.errors import LayoutError
from tutti.graph.edits.edit import source_of
from tutti.pipeline.micro_batches.moments import DURING, Moments
from tutti.pipeline.micro_batches.second_passes import FIX, in_words, reader_of_update
from tutti.user_lines import quoted

_NONE = "no op of its forward that runs for each micro-batch has any work"


def too_few_ops(moments: Moments, num_stages: int, num_ops: int) -> LayoutError:
    """The error for `num_ops` ops of the forward that run for each micro-batch and have work."""
    what, at = f"cannot cut the step into {num_stages} stages", ""
    if num_ops:
        why = f"its forward has {num_ops} ops that run for each micro-batch and are not mere views"
        return LayoutError(what, why=why, fix=f"pipe={num_ops} at most")
    why, fix = _NONE, "pipe=1; or one forward, one backward and one update of the model a step"
    nodes = moments.graph.nodes
    if any(_is_batch(n) and not n.meta["val"].numel() for n in nodes):
        fix = "pipe=1; or leave out batches whose tensors have no elements"
    elif reader := reader_of_update(n for n in nodes if n.meta.get("region") == "backward"):
        at = quoted(source_of(reader))
        why += f", and {in_words(reader)} reads the result of an update"
        fix = f"pipe=1; or {FIX}"
    elif whole := next((n for n in nodes if _takes_whole(n, moments)), None):
        at = quoted(source_of(whole))
        why += f": {in_words(whole)} reads all samples of the batch at once"
    elif not any(_is_batch(n) and n.users for n in nodes):
        why += ": the step reads no tensor of its batch"
    return LayoutError(what, at=at, why=why, fix=fix)


def _is_batch(node: fx.Node) -> bool:
    return node.meta.get("kind") == "batch"


def _takes_whole(node: fx.Node, moments: Moments) -> bool:
    """Whether a node of the forward reads the batch, and not once a micro-batch."""
    reads = any(_is_batch(x) for x in node.all_input_nodes)
    return reads and node.meta.get("region") == "forward" and moments.when[node] != DURING
