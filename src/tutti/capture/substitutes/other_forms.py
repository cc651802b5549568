"""Other forms, for a trace, of ops that cannot be split or whose shapes depend on values.

`OTHER_FORMS` is a table of op to function, in the form of `make_fx`'s decompositions: it applies below
autograd, so an op and its backward each have an entry. `in_other_forms` replaces PyTorch's functions by
tutti's, above autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tutti.capture.patch_table import (
    ANY,
    CHECK_TENSOR,
    CTC_LOSS,
    EMBEDDING_BAG,
    GAUSSIAN_NLL,
    MASKED_SCATTER,
    SETITEM,
)
from tutti.capture.substitutes import (
    bags,
    bincount,
    ctc_loss,
    grouped_matmul,
    inference_modes,
    masks,
    scaler,
    without_cudnn,
)
from tutti.graph.edits.patch import replaced

aten = torch.ops.aten


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _close(
    a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(torch.isclose(a, b, rtol, atol, equal_nan).all())


OTHER_FORMS: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: ctc_loss.losses,
    aten._ctc_loss_backward.Tensor: ctc_loss.losses_backward,
    aten._use_cudnn_ctc_loss.Tensor: ctc_loss.no_cudnn,
    aten.bincount.default: bincount.counts_of,
    # Functions that return a plain `bool` read a tensor's value.
    aten.equal.default: _equal,
    aten.allclose.default: _close,
    aten._grouped_mm.default: grouped_matmul.grouped_mm,
    **scaler.FORMS,
}
_GAUSSIAN_NLL: Any = F.gaussian_nll_loss


def _gaussian_nll_loss(*args: Any, **kwargs: Any) -> Tensor:
    """The loss without its check for a negative variance."""
    with replaced((ANY, lambda *_, **__: False)):
        return _GAUSSIAN_NLL(*args, **kwargs)


def _unchecked(*_given: Any) -> None:
    """Skip a step's assertions on values, as Python's `-O` does: a trace has no values."""


_FUNCTIONS = (
    (CTC_LOSS, ctc_loss.loss_of),
    (EMBEDDING_BAG, bags.embedding_bag),
    (GAUSSIAN_NLL, _gaussian_nll_loss),
    (SETITEM, masks.write),
    *((patch, masks.scattered) for patch in MASKED_SCATTER),
    (CHECK_TENSOR, _unchecked),
    *without_cudnn.FUNCTIONS,
    *inference_modes.FUNCTIONS,
)


@contextlib.contextmanager
def in_other_forms() -> Iterator[None]:
    """Inside, tutti's functions replace PyTorch's."""
    with replaced(*_FUNCTIONS), scaler.branching_scaler():
        yield
