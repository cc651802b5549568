"""Dense forms of sparse tensors: gradients of lookups, and adjacencies in a batch.

A rank's part of a sparse tensor would have a size that depends on values. A dense form replaces it if it
gives the numbers of one device; capture refuses an optimizer that treats sparse gradients differently.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import SGD, Adagrad, Optimizer

from tutti.capture.patch_table import DENSE_BAG, DENSE_EMBEDDING
from tutti.capture.substitutes import bags
from tutti.errors import CaptureError
from tutti.graph.edits.patch import replaced
from tutti.quantities import format_nbytes
from tutti.torch_private.pytrees import tree_leaves, tree_map_only
from tutti.user_lines import quoted, user_line

# Optimizers with the same numbers for a sparse gradient and its dense form, which adds zeros.
_SAME = tuple(inspect.unwrap(kind.step) for kind in (SGD, Adagrad))
# The most bytes of the dense form of a batch's tensor.
_ROOM = 1 << 30
_EMBEDDING: Any = torch.embedding


def dense(batch: Any) -> Any:
    """The batch with each sparse tensor as a dense one.

    Raises `CaptureError` for a dense tensor of more than 1 GiB.
    """
    if type(batch) is tuple and all(type(x) is Tensor and _is_plain(x) for x in batch):
        return batch  # the common case
    if all(_is_plain(x) for x in tree_leaves(batch) if isinstance(x, Tensor)):
        return batch
    return tree_map_only(Tensor, _dense, batch)


def _is_plain(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def _dense(x: Tensor) -> Tensor:
    if _is_plain(x):
        return x
    if x.is_nested:
        raise CaptureError(
            "the batch holds a nested tensor",
            why="every tensor of a step has one shape, which ranks split",
            fix="torch.nested.to_padded_tensor(x, 0.0) before the step, and the lengths beside it",
        )
    nbytes = x.numel() * x.element_size()
    if nbytes > _ROOM:
        raise CaptureError(
            f"the batch holds a sparse tensor {list(x.shape)}, {format_nbytes(nbytes)} as a dense one",
            why="a step computes with dense tensors: a rank's part of a sparse one has no fixed size",
            fix="its rows, columns and values: out.index_add(0, rows, values[:, None] * x[columns])",
        )
    return x.to_dense()


def refuse_sparse_state(module: nn.Module) -> None:
    """Raise `CaptureError` for a sparse parameter or buffer."""
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if x.layout != torch.strided:
            key = name.rpartition(".")[2]
            raise CaptureError(
                f'"{name}" is a sparse tensor ({str(x.layout).removeprefix("torch.")})',
                why="state is split over ranks in parts of a fixed size",
                fix=f'register_buffer("{key}", {key}.to_dense()), which @ and torch.sparse.mm take as well',
            )


def refuse_sparse_constants(traced: fx.GraphModule) -> None:
    """Raise `CaptureError` for a sparse tensor from outside of the step's arguments."""
    for node in traced.graph.nodes:
        value = getattr(traced, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and not _is_plain(value):
            sources = (x.meta.get("source") for x in node.users)
            raise CaptureError(
                f"the step reads a sparse tensor {list(value.shape)} that is none of its arguments",
                at=quoted(next(filter(None, sources), "")),
                why="a rank's part of a sparse tensor has no fixed size",
                fix="hand it over as one of the arguments of the step, where it is taken as dense; or keep "
                "a.to_dense() in its place, which @ and torch.sparse.mm take as well",
            )


@contextlib.contextmanager
def dense_gradients(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside, lookups have dense gradients, for any `sparse`.

    Raises `CaptureError` for a lookup with `sparse=True` in a weight whose optimizer treats such gradients
    differently.
    """

    def apart(weight: Tensor) -> Optimizer | None:
        for one in optimizers:
            held = any(weight is p for group in one.param_groups for p in group["params"])
            if held and inspect.unwrap(type(one).step) not in _SAME:
                return one
        return None

    def refuse(weight: Tensor) -> None:
        if (one := apart(weight)) is not None:
            kind = type(one).__name__
            raise CaptureError(
                f"the step gives {kind} a sparse gradient",
                at=quoted(user_line()),
                why="gradients are dense in a captured step; only of SGD and Adagrad it is known that the "
                "numbers are the same",
                fix=f"sparse=False, if {kind} takes dense gradients; or SGD or Adagrad",
            )

    def embedding(weight: Tensor, indices: Tensor, *rest: Any, **named: Any) -> Tensor:
        options = dict(zip(("padding_idx", "scale_grad_by_freq", "sparse"), rest, strict=False))
        options |= named
        if options.pop("sparse", False):
            refuse(weight)
        return _EMBEDDING(weight, indices, **options)

    def embedding_bag(weight: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
        if named.pop("sparse", False) or (len(rest) > 4 and rest[4]):
            refuse(weight)
            rest = (*rest[:4], False, *rest[5:])
        return bags.embedding_bag(weight, *rest, **named)

    with replaced((DENSE_EMBEDDING, embedding), (DENSE_BAG, embedding_bag)):
        yield
