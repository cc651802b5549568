"""Sample calls of every op in the table, by family; see `rules.samples.sample`."""

from __future__ import annotations

import torch

from tutti.graph.ops.boundary import shard_as_op
from tutti.graph.ops.checked_ids import from_start
from tutti.graph.ops.counts import bincount
from tutti.graph.randomness.draw import draw
from tutti.rules.samples.ctc_samples import CTC
from tutti.rules.samples.expert_samples import EXPERTS
from tutti.rules.samples.image_samples import IMAGES, INTERPOLATION
from tutti.rules.samples.layer_samples import ATTENTION, NORMS
from tutti.rules.samples.matrix_samples import CONTRACTIONS, LINEAR_ALGEBRA
from tutti.rules.samples.sample import (
    Sample,
    distinct,
    f,
    flags,
    ints,
    ordered,
    pairs,
    positive,
    sample,
    some,
)
from tutti.rules.samples.update_samples import UPDATES

_CPU = torch.device("cpu")
_F64 = torch.float64
INF = float("inf")


def _draw(kind: str, *params: float, shape: tuple[int, ...] = (4, 12)) -> Sample:
    return Sample(draw, (kind, list(shape), list(params), _F64, _CPU, 3))


VIEWS = [
    sample("reshape", f(4, 6, 12), [24, 12]),
    sample("reshape", f(24, 12), [4, 6, 12]),
    sample("reshape", f(4, 6, 12), [4, 72]),
    sample("reshape", f(4, 1, 6), [4, 6, 1, 1]),
    sample("reshape", f(6, 4), [4, 6]),
    sample("reshape", f(12, 4, 6), [4, 3, 24]),
    sample("reshape", f(8, 6, 5), [2, 4, 6, 5]),
    sample("view", f(4, 6, 12), [24, 12]),
    sample("permute", f(4, 6, 12), [2, 0, 1]),
    sample("expand", f(4, 1, 12), [6, 4, 8, 12]),
    sample("expand", f(4, 1), [-1, 6]),
    sample("repeat", f(4, 6), [2, 1, 3]),
    sample("roll", f(4, 6, 12), [1], [1]),
    sample("roll", f(4, 6), [2, -1], [0, -1]),
    sample("roll", f(4, 6), [2]),
    sample("diagonal", f(4, 6, 6), 0, 1, 2),
    sample("diagonal", f(6, 4, 6), 1, -1, 0),
    sample("diagonal_backward", f(4, 6), [4, 6, 6], 0, 1, 2),
    sample("diag_embed", f(4, 6)),
    sample("diag_embed", f(4, 6, 3), 1, 0, 2),
    sample("diagonal_scatter", f(4, 6, 6), f(4, 6), 0, 1, 2),
    sample("diagonal_scatter", f(6, 4, 6), f(4, 5), -1, -1, 0),
    sample("view_as_complex", f(4, 6, 2)),
    sample("view_as_real", pairs(4, 6)),
    sample("full", [4, 12], 1.5, dtype=_F64, device=_CPU),
    _draw("bernoulli", 0.4),
    _draw("uniform", -1.0, 2.0),
    _draw("normal", 0.0, 1.0),
    _draw("randint", 0.0, 100.0),
    _draw("permutation", shape=(12,)),
    Sample(shard_as_op, (f(4, 6), "data, -")),
]

_REDUCING = ("sum.dim_IntList", "amax", "amin")
REDUCTIONS = [
    Sample(bincount, (ints(6, 12), None, 8)),
    Sample(bincount, (ints(6, 12), f(12), 6)),
    *(sample(op, f(4, 6, 12), [1]) for op in _REDUCING),
    *(sample(op, f(4, 6, 12), [0, -1], True) for op in _REDUCING),
    *(sample(op, f(4, 6), []) for op in _REDUCING),
    sample("sum.dim_IntList", flags(4, 6), [1], dtype=_F64),
    sample("prod", f(4, 6)),
    sample("prod.dim_int", f(4, 6, 12), 1, True),
    sample("prod.dim_int", f(4, 6), -1),
    *(sample(op, flags(4, 6)) for op in ("any", "all")),
    *(sample(f"{op}.dim", flags(4, 6), -1) for op in ("any", "all")),
    *(sample(f"{op}.dims", flags(4, 6, 12), [0, 2], True) for op in ("any", "all")),
    *(sample(f"{op}.dims", flags(4, 6)) for op in ("any", "all")),
    *(sample(op, f(4, 6)) for op in ("max", "min", "median", "argmax", "argmin")),
    *(sample(op, f(4, 6, 12), 1, True) for op in ("argmax", "argmin")),
    *(sample(f"{op}.dim", f(4, 6, 12), -1) for op in ("max", "min", "median")),
    *(sample(f"{op}.dim", f(4, 6, 12), 1, True) for op in ("max", "min")),
    sample("aminmax", f(4, 6, 12), dim=1),
    sample("kthvalue", f(4, 6, 12), 2, 1),
    sample("mode", ints(3, 4, 6, 12), 1, True),
    sample("count_nonzero", ints(2, 4, 6)),
    sample("count_nonzero.dim_IntList", ints(2, 4, 6), [1]),
    sample("logsumexp", f(4, 6, 12), [1]),
    sample("logsumexp", f(4, 6, 12), [0, -1], True),
    sample("linalg_vector_norm", f(4, 6)),
    sample("linalg_vector_norm", f(4, 6, 12), 2, [1]),
    sample("linalg_vector_norm", f(4, 6, 12), 3.0, [-1, 0], True),
    sample("linalg_vector_norm", f(4, 6), INF),
    sample("linalg_vector_norm", f(4, 6), -INF, [1]),
    sample("linalg_vector_norm", f(4, 6), 0, [1]),
    sample("linalg_vector_norm", f(4, 6), 1),
    *(sample("linalg_vector_norm", pairs(4, 6), order, [1]) for order in (0, 1, 2, 3.0, INF)),
    *(sample(f"{op}.correction", f(4, 6, 12), [1]) for op in ("var", "std", "var_mean")),
    *(sample(f"{op}.correction", f(4, 6, 12), [-1, 0], correction=0, keepdim=True)
      for op in ("var", "std", "var_mean")),
    *(sample(f"{op}.correction", f(4, 6)) for op in ("var", "std", "var_mean")),
    *(sample(f"{op}.correction", pairs(4, 6), [0]) for op in ("var", "std", "var_mean")),
]  # fmt: skip

LINES = [
    *(sample(op, f(4, 6, 12), 1, False) for op in ("_softmax", "_log_softmax")),
    *(sample(op, f(4, 6), -1, False) for op in ("_softmax", "_log_softmax")),
    sample("_safe_softmax", f(4, 6, 12), -1),
    sample("_softmax_backward_data", f(4, 6, 12), positive(4, 6, 12), 1, _F64),
    sample("_log_softmax_backward_data", f(4, 6, 12), f(4, 6, 12), -1, _F64),
    *(sample(op, f(4, 6, 12), 1) for op in ("cumsum", "cumprod", "logcumsumexp")),
    *(sample(op, f(4, 6, 12), -1) for op in ("cummax", "cummin")),
    sample("sort", f(4, 6, 12), 1, True),
    sample("sort.stable", f(4, 6), stable=True),
    sample("sort.stable", f(4, 6, 12), stable=True, dim=1),
    sample("argsort", f(4, 6, 12), 1),
    sample("flip", f(4, 6, 12), [1]),
    sample("flip", f(4, 6, 12), [0, -1]),
    sample("topk", f(4, 6, 12), 2, 1),
    sample("topk", f(4, 12), 4),
    sample("topk", f(), 1),
    sample("glu", f(4, 6, 12)),
    sample("glu", f(4, 6, 12), 1),
    sample("glu_backward", f(4, 6, 6), f(4, 6, 12), 2),
]

FOURIER = [
    sample("_fft_r2c", f(4, 6, 12), [1], 0, True),
    sample("_fft_r2c", f(4, 6, 12), [0, 2], 1, True),
    sample("_fft_r2c", f(4, 6, 12), [0], 2, False),
    sample("_fft_c2c", pairs(4, 6, 12), [1, 2], 2, True),
    sample("_fft_c2c", pairs(4, 6), [0], 0, False),
    sample("_fft_c2r", pairs(4, 6, 7), [2], 2, 12),
    sample("_fft_c2r", pairs(4, 6, 4), [0, 1], 0, 6),
]

_POINTWISE_LOSSES = (
    ("mse_loss", ()), ("smooth_l1_loss", (0.5,)), ("huber_loss", (0.5,)), ("soft_margin_loss", ()),
)  # fmt: skip
LOSSES = [
    *(sample(op, f(4, 6), f(4, 6), how, *rest) for op, rest in _POINTWISE_LOSSES for how in (0, 1, 2)),
    *(sample(f"{op}_backward", f(4, 6), f(4, 6), f(4, 6), 0, *rest) for op, rest in _POINTWISE_LOSSES),
    *(sample(f"{op}_backward", f(), f(4, 6), f(4, 6), how, *rest)
      for op, rest in _POINTWISE_LOSSES for how in (1, 2)),
    *(sample("binary_cross_entropy", positive(4, 6), positive(4, 6), w, how)
      for w in (None, positive(4, 6), positive(6)) for how in (0, 1, 2)),
    *(sample("binary_cross_entropy_backward", f(), positive(4, 6), positive(4, 6), w, how)
      for w in (None, positive(4, 6)) for how in (1, 2)),
    sample("binary_cross_entropy_backward", f(4, 6), positive(4, 6), positive(4, 6), None, 0),
    *(sample("binary_cross_entropy_with_logits", f(4, 6), positive(4, 6), w, p, how)
      for w, p in ((None, None), (positive(4, 6), positive(6))) for how in (0, 1, 2)),
    *(sample("nll_loss_forward", f(12, 8), some(8, ignore, 12), w, how, ignore)
      for w in (None, positive(8)) for how, ignore in ((0, -100), (2, -100), (2, 3), (1, -100))),
    *(sample("nll_loss_backward", f(), f(12, 8), some(8, ignore, 12), w, 2, ignore, positive())
      for w in (None, positive(8)) for ignore in (-100, 3)),
    sample("nll_loss_backward", f(12), f(12, 8), some(8, -100, 12), None, 0, -100, positive()),
    *(sample("multi_margin_loss", f(4, 6), ints(6, 4), 2, 0.5, w, how)
      for w, how in ((None, 0), (positive(6), 2), (None, 1))),
    *(sample("multi_margin_loss_backward", f(*g), f(4, 6), ints(6, 4), 1, 0.5, w, how)
      for g, w, how in (((4,), positive(6), 0), ((), None, 2), ((), None, 1))),
    *(sample("multilabel_margin_loss_forward", f(4, 6), some(6, -1, 4, 6), how) for how in (0, 2, 1)),
    *(sample("multilabel_margin_loss_backward", f(*g), f(4, 6), some(6, -1, 4, 6), how, positive(4, 6))
      for g, how in (((4,), 0), ((), 2), ((), 1))),
    *(sample("nll_loss2d_forward", f(4, 8, 2, 3), some(8, ignore, 4, 2, 3), w, how, ignore)
      for w in (None, positive(8)) for how, ignore in ((0, -100), (2, 3), (1, -100))),
    *(sample("nll_loss2d_backward", f(), f(4, 8, 2, 3), some(8, 3, 4, 2, 3), w, 2, 3, positive())
      for w in (None, positive(8))),
    *CTC,
]  # fmt: skip

_FRAMES = ("reflection", "replication")
CUTS = [
    sample("slice.Tensor", f(4, 12, 6), 1, 2, 8),
    sample("slice.Tensor", f(12, 6), 0, 1, 12, 2),
    sample("slice.Tensor", f(4, 12), -1, -4, 2**63 - 1),
    sample("select.int", f(4, 12, 6), 1, 3),
    sample("select.int", f(4, 12), -1, -2),
    sample("slice_backward", f(4, 6, 6), [4, 12, 6], 1, 2, 8, 1),
    sample("slice_backward", f(4, 6), [4, 12], -1, 0, 12, 2),
    sample("select_backward", f(4, 6), [4, 12, 6], 1, 3),
    sample("slice_scatter", f(4, 12, 6), f(4, 6, 6), 1, 2, 8),
    sample("slice_scatter", f(12, 6), f(4, 6), 0, 0, 4),
    sample("select_scatter", f(4, 12, 6), f(4, 6), 1, 3),
    sample("cat", [f(4, 6, 12), f(4, 3, 12), f(4, 12, 12)], 1),
    sample("cat", [f(4, 6), f(8, 6)]),
    sample("stack", [f(4, 6), f(4, 6), f(4, 6)], -1),
    sample("stack", [f(4, 6), f(4, 6)]),
    sample("constant_pad_nd", f(4, 6, 12), [1, 2]),
    sample("constant_pad_nd", f(4, 6, 12), [0, 0, 2, -1], 1.5),
    sample("tril", f(4, 6, 12), 1),
    sample("triu", f(6, 12)),
    *(sample(f"{how}_pad1d", f(4, 6, 8), [1, 2]) for how in _FRAMES),
    *(sample(f"{how}_pad2d", f(4, 6, 5), [1, 2, 0, 1]) for how in _FRAMES),
    *(sample(f"{how}_pad3d", f(4, 6, 3, 3, 3), [1, 2, 0, 1, 1, 0]) for how in _FRAMES),
    *(sample(f"{how}_pad3d_backward", f(4, 6, 4, 4, 6), f(4, 6, 3, 3, 3), [1, 2, 0, 1, 1, 0])
      for how in _FRAMES),
    *(sample(f"{how}_pad1d_backward", f(4, 6, 11), f(4, 6, 8), [1, 2])
      for how in _FRAMES),
    *(sample(f"{how}_pad2d_backward", f(4, 6, 6, 8), f(4, 6, 5, 5), [1, 2, 0, 1])
      for how in _FRAMES),
    sample("unfold", f(4, 12, 6), 1, 4, 2),
    sample("unfold", f(), 0, 1, 1),
    sample("unfold_backward", f(4, 5, 6, 4), [4, 12, 6], 1, 4, 2),
    sample("unfold_backward", f(1), [], 0, 1, 1),
]  # fmt: skip

LOOKUPS = [
    sample("embedding", f(12, 6), ints(12, 4, 8)),
    sample("embedding", f(12, 6), ints(12)),
    sample("embedding_dense_backward", f(4, 8, 6), ints(12, 4, 8), 12, -1, False),
    sample("embedding_dense_backward", f(4, 8, 6), ints(12, 4, 8), 12, 3, False),
    sample("embedding_dense_backward", f(4, 8, 6), ints(12, 4, 8), 12, 3, True),
    sample("index.Tensor", f(12, 6, 4), [ints(12, 8)]),
    sample("index.Tensor", f(6, 12, 4), [None, ints(12, 4, 6)]),
    sample("index.Tensor", f(6, 4, 12, 8), [None, ints(4, 6), ints(12, 6)]),
    sample("index.Tensor", f(6, 4, 12), [ints(6, 8, 1), None, ints(12, 1, 4)]),
    sample("index_put", f(12, 6), [ints(12, 8)], f(8, 6), True),
    sample("index_put", f(12, 4, 6), [distinct(12, 8)], f(8, 4, 6)),
    sample("index_put", f(12, 4, 6), [ints(12, 8), ints(4, 8)], f(6), True),
    sample("index_put", f(4, 12, 6), [None, ints(12, 8)], f(4, 8, 6), True),
    sample("index_put", f(4, 12, 6, 4), [None, ints(12, 8), ints(6, 8)], f(4, 8, 4), True),
    sample("index_put", f(8, 4, 12), [ints(8, 6), None, ints(12, 6)], f(6, 4), True),
    sample("index_put", f(4, 12, 6), [None, distinct(12, 8)], f(1, 6)),
    sample("index_put", f(12, 4), [flags(12, 4)], f()),
    sample("index_put", f(12, 4, 6), [flags(12, 4)], f(1)),
    sample("nonzero_static", flags(6, 12), size=40),
    sample("gather", f(4, 12, 6), 1, ints(12, 4, 3, 6)),
    sample("gather", f(4, 12), -1, ints(12, 2, 12)),
    sample("scatter.src", f(4, 12, 6), 1, distinct(12, 4, 12, 6), f(4, 12, 6)),
    sample("scatter.value", f(4, 12, 6), -2, ints(12, 4, 3, 6), 2.5),
    sample("scatter_add", f(4, 12, 6), 1, ints(12, 4, 8, 6), f(4, 8, 6)),
    sample("scatter_reduce.two", f(4, 12, 6), 1, ints(12, 4, 8, 6), f(4, 8, 6), "amax"),
    sample("index_select", f(4, 12, 6), 1, ints(12, 8)),
    sample("index_select", f(4, 12, 6), 1, ints(12)),
    sample("index_select", f(), 0, ints(1, 1)),
    sample("index_copy", f(), 0, ints(1, 1), f(1)),
    sample("index_add", f(4, 12, 6), 1, ints(12, 8), f(4, 8, 6), alpha=2),
    sample("index_copy", f(4, 12, 6), 1, distinct(12, 8), f(4, 8, 6)),
    sample("index_fill.int_Scalar", f(4, 12, 6), 1, ints(12, 3), 0.5),
    sample("index_fill.int_Scalar", f(), 0, ints(1, 1), 0.5),
    sample("index_fill.int_Tensor", f(4, 12, 6), 1, ints(12, 3), f()),
    Sample(from_start, (ints(12, 4, 6), 12, True)),
    sample("bucketize.Tensor", f(4, 6), ordered(8)),
    sample("searchsorted.Tensor", ordered(8), f(4, 6), right=True),
    sample("arange", 12), sample("arange.start", 3, 15), sample("arange.start_step", 0, 24, 2),
    sample("linspace", 0.0, 1.0, 12), sample("eye", 6), sample("eye.m", 6, 12),
]  # fmt: skip

FAMILIES = {
    "views": VIEWS,
    "contractions": CONTRACTIONS,
    "reductions": REDUCTIONS,
    "lines": LINES,
    "losses": LOSSES,
    "cuts": CUTS,
    "lookups": LOOKUPS,
    "experts": EXPERTS,
    "norms": NORMS,
    "images": IMAGES,
    "interpolation": INTERPOLATION,
    "fourier transforms": FOURIER,
    "linear algebra": LINEAR_ALGEBRA,
    "attention": ATTENTION,
    "updates": UPDATES,
}
