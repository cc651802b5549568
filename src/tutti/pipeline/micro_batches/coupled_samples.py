"""The refusal of an op that needs all samples of a batch at once: what in the user's program it is."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tutti.errors import ShardingError
from tutti.graph.analysis.order import ancestors
from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives
from tutti.graph.text import op_name

aten = torch.ops.aten
_PARTS = (aten.select.int, aten.slice.Tensor)


def coupling(coupled: fx.Node, summed: fx.Node, op: str, at: str, num_micro: int) -> ShardingError:
    """The error for the op `coupled`, which reads `summed` over the whole batch."""
    value = _named(summed.meta.get("value", summed))
    late = "over the whole batch, which would be known only after the last micro-batch"
    if _joins_samples(coupled) or (
        _takes_samples(coupled) and any(map(_joins_samples, ancestors([summed])))
    ):
        why = (
            f"it reads {value} {late}, behind or in a torch.cat along dim 0. A batch is split along dim 0: a "
            "micro-batch would need rows of others"
        )
        fix = (
            "a call for each tensor, model(x) and model(z), in place of model(torch.cat([x, z])).chunk(2); "
            f"or leave micro={num_micro} out"
        )
    elif _takes_samples(coupled):
        why = (
            f"it takes samples out of {value} {late}. A batch is split along dim 0: a loop over its rows or "
            "chunks (for row in x, x[i], x.unbind(), x.split(n)) reads all of them, even if it computes each "
            "on its own"
        )
        fix = (
            "the same on the whole tensor: torch.logsumexp(x, -1) in place of "
            "torch.stack([torch.logsumexp(row, -1) for row in x]); two batches as two tensors; or leave "
            f"micro={num_micro} out"
        )
    elif _reads_changed_weights(coupled, summed):
        why = (
            f"it reads a sum of {value} {late}, and that a backward has made: a second forward with weights "
            "that the gradient of the first one has changed (MAML, SAM) needs all samples of the first"
        )
        fix = f"leave micro={num_micro} out"
    else:
        read = value if summed.target is collectives.all_gather else f"a sum of {value}"
        why = (
            f"it reads {read} {late}. A batch is split along dim 0: BatchNorm in training and contrastive "
            "losses need all of it, and so does what mixes dim 0 where the samples lie in another"
        )
        fix = (
            f"leave micro={num_micro} out; or samples along dim 0 of each tensor; or for "
            "BatchNorm a norm of each sample (GroupNorm, LayerNorm)"
        )
    what = f"micro={num_micro} cannot split the batch in time: {op} needs all its samples at once"
    return ShardingError(what, at=at, why=why, fix=fix)


def _named(value: fx.Node) -> str:
    """The op of a value, with its line in the user's program if that is known."""
    # One of the results of an op; a sum of a value.
    while value.target is operator.getitem or value.target in collectives.COLLECTIVES:
        value = value.all_input_nodes[0]
    source = source_of(value)
    return f"{op_name(value)} ({source})" if source else op_name(value)


def _reads_changed_weights(coupled: fx.Node, summed: fx.Node) -> bool:
    """Whether an op of a forward depends on the gradients of weights: sums over samples, of a backward.

    The gradients of samples (Langevin dynamics) are no sums.
    """
    if coupled.meta.get("region") != "forward" or summed.target is collectives.all_gather:
        return False
    return any(x.meta.get("region") == "backward" for x in ancestors([summed]))


def _joins_samples(node: fx.Node) -> bool:
    """Whether a node joins tensors along dim 0."""
    return node.target is aten.cat.default and (len(node.args) < 2 or bool(node.args[1] == 0))


def _takes_samples(node: fx.Node) -> bool:
    """Whether a node takes a part of dim 0."""
    return node.target in _PARTS and len(node.args) > 1 and bool(node.args[1] == 0)
