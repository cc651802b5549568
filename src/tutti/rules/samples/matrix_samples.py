"""Sample calls of contractions and of dense linear algebra; see `rules.samples`."""

from __future__ import annotations

import torch

from tutti.rules.samples.sample import definite, f, pairs, pivots, positive, regular, sample, unread

INF = float("inf")

CONTRACTIONS = [
    sample("mm", f(12, 8), f(8, 6)),
    sample("bmm", f(4, 12, 8), f(4, 8, 6)),
    sample("mv", f(12, 8), f(8)),
    sample("dot", f(12), f(12)),
    sample("addmm", f(6), f(12, 8), f(8, 6)),
    sample("addmm", f(12, 6), f(12, 8), f(8, 6), beta=0.5, alpha=2.0),
    sample("addmm", f(1, 6), f(12, 8), f(8, 6)),
    sample("addmm", f(12, 1), f(12, 8), f(8, 6)),
    sample("addmv", f(12), f(12, 8), f(8)),
    sample("addmm", unread(6), f(12, 8), f(8, 6), beta=0, alpha=0.5),
    sample("addmv", unread(12), f(12, 8), f(8), beta=0),
    sample("linalg_cross", f(4, 6, 3), f(4, 6, 3)),
    sample("linalg_cross", f(4, 3, 6), f(4, 3, 6), dim=1),
    sample("vdot", f(12), f(12)),
    sample("vdot", pairs(12), pairs(12)),
    sample("_trilinear", f(4, 6), f(3, 6, 12), f(4, 12), [1, 3], [0], [1, 2], [2, 3]),
    sample("_trilinear", f(4, 6), f(4, 3), f(4, 12), [1, 3], [2, 3], [1, 2], [0]),
    *(sample("_cdist_forward", f(12, 6), f(8, 6), p, None) for p in (2.0, 1.0, INF)),
    sample("_cdist_forward", f(4, 12, 6), f(1, 8, 6), 3.0, 2),
    sample("_euclidean_dist", f(4, 12, 6), f(4, 8, 6)),
    *(sample("_cdist_backward", f(12, 8), f(12, 6), f(8, 6), p, positive(12, 8))
      for p in (2.0, 1.0)),
    sample("_cdist_backward", f(4, 12, 8), f(4, 12, 6), f(4, 8, 6), 3.0, positive(4, 12, 8)),
]  # fmt: skip

_TWO, _LEAD = definite(6, 4, 4), definite(2, 6, 4, 4)
_ONE, _ANY = regular(4, 4), regular(6, 4, 4)
LINEAR_ALGEBRA = [
    *([sample("cholesky", _TWO)] if hasattr(torch.ops.aten, "cholesky") else []),
    sample("cholesky_inverse", _ANY),
    sample("linalg_matrix_exp", f(2, 6, 3, 3)),
    sample("linalg_cholesky_ex", _LEAD),
    sample("linalg_inv_ex", _ANY),
    *(sample(op, _ANY) for op in ("_linalg_det", "_linalg_slogdet")),
    *(sample("_linalg_eigh", _TWO, *given) for given in ((), ("L", False))),
    *(sample(op, _ANY) for op in ("_linalg_eigvals", "linalg_eig")),
    *(sample("_linalg_svd", f(6, 4, 3), full, uv)
      for full, uv in ((False, True), (True, True), (False, False))),
    *(sample("linalg_qr", f(6, 4, 3), mode) for mode in ("reduced", "complete", "r")),
    sample("geqrf", f(6, 4, 3)),
    sample("linalg_householder_product", f(6, 4, 3), positive(6, 2)),
    *(sample(op, f(6, 4, 3)) for op in ("linalg_lu", "linalg_lu_factor_ex")),
    sample("lu_unpack", f(6, 4, 3), pivots(6, 3)),
    sample("lu_unpack", f(6, 4, 3), pivots(6, 3), False),
    sample("linalg_ldl_factor_ex", _TWO),
    sample("linalg_pinv.atol_rtol_tensor", f(6, 4, 3)),
    sample("linalg_pinv.atol_rtol_tensor", f(6, 4, 3), atol=positive(), rtol=positive()),
    sample("_linalg_solve_ex", _ANY, f(6, 4, 8)),
    sample("_linalg_solve_ex", _ANY, f(6, 4)),
    sample("_linalg_solve_ex", _ONE, f(6, 4, 8)),
    sample("_linalg_solve_ex", _ANY, f(6, 8, 4), left=False),
    sample("linalg_solve_triangular", _ANY, f(6, 4, 8), upper=False),
    sample("linalg_solve_triangular", _ONE, f(2, 6, 8, 4), upper=True, left=False),
    sample("triangular_solve", f(6, 4, 8), _ANY),
    sample("triangular_solve", f(4, 8), _ANY, False, True),
    sample("cholesky_solve", f(6, 4, 8), _ANY),
    sample("cholesky_solve", f(4, 8), _ANY, True),
    sample("linalg_lu_solve", _ANY, pivots(6, 4), f(6, 4, 8)),
    sample("linalg_lu_solve", _ANY, pivots(6, 4), f(6, 8, 4), left=False),
    sample("linalg_ldl_solve", _TWO, pivots(6, 4), f(6, 4, 8)),
]  # fmt: skip
