"""Dense linear algebra: each matrix stays whole; leading dims and a right-hand side's columns split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from tutti.rules.rule import Rule, groups, operands_of, results_of, shape, spelled

aten = torch.ops.aten
_EACH = "... n! m!"


def _matrices(text: str, **options: Any) -> Callable[[fx.Node], Rule]:
    """Rule `text` of a call; a result that a call omits (eigenvectors, say) is empty.

    Further operands (tolerances) stay whole.
    """

    def rule(node: fx.Node) -> Rule:
        left, right = text.split(" -> ")
        pairs = zip(right.split(","), results_of(node), strict=True)
        right = ",".join("?" if r is not None and r.shape == (0,) else term for term, r in pairs)
        left += ", ?" * (len(operands_of(node)) - left.count(",") - 1)
        return spelled(f"{left} -> {right}", **options)(node)

    return rule


def _solving(a: int, b: int, others: str = "") -> Callable[[fx.Node], Rule]:
    """A X = B, or X A = B, for operands `a` and `b`: the columns (or rows) of B are independent.

    Further results (`others`: the factors of A) do not depend on B, so every rank makes them the same.
    A call with such results passes no pending sum.
    """

    def rule(node: fx.Node) -> Rule:
        operands = [shape(x) for x in operands_of(node)]
        first = results_of(node)[0]
        assert isinstance(first, Tensor)
        vectors = len(operands[b]) < 2 or len(first.shape) < max(map(len, operands))
        right = "... k n!" if node.kwargs.get("left") is False else "... n! k"
        right = "... n!" if vectors else right
        terms = {a: _EACH, b: right}
        left = ", ".join(terms.get(i, "... p!") for i in range(len(operands)))
        text = f"{left} -> {right}{others}"
        apart = frozenset(range(1, len(results_of(node))))
        return _matrices(text, linear=() if apart else groups((b,)), apart=apart)(node)

    return rule


RULES = {
    aten.cholesky_inverse.default: _matrices(f"{_EACH} -> {_EACH}"),
    aten.linalg_matrix_exp.default: _matrices(f"{_EACH} -> {_EACH}"),
    aten.linalg_cholesky_ex.default: _matrices(f"{_EACH} -> {_EACH}, ..."),
    aten.linalg_inv_ex.default: _matrices(f"{_EACH} -> {_EACH}, ..."),
    aten._linalg_det.default: _matrices(f"{_EACH} -> ..., {_EACH}, ... n!"),
    aten._linalg_slogdet.default: _matrices(f"{_EACH} -> ..., ..., {_EACH}, ... n!"),
    aten._linalg_eigh.default: _matrices(f"{_EACH} -> ... n!, {_EACH}"),
    aten._linalg_eigvals.default: _matrices(f"{_EACH} -> ... n!"),
    aten.linalg_eig.default: _matrices(f"{_EACH} -> ... n!, {_EACH}"),
    aten._linalg_svd.default: _matrices(f"{_EACH} -> ... n! u!, ... s!, ... v! m!"),
    aten.linalg_qr.default: _matrices(f"{_EACH} -> ... n! k!, ... k! m!"),
    aten.geqrf.default: _matrices(f"{_EACH} -> {_EACH}, ... k!"),
    aten.linalg_householder_product.default: _matrices(f"{_EACH}, ... k! -> {_EACH}"),
    aten.linalg_lu.default: _matrices(f"{_EACH} -> ... n! p!, ... n! k!, ... k! m!"),
    aten.linalg_lu_factor_ex.default: _matrices(f"{_EACH} -> {_EACH}, ... k!, ..."),
    aten.lu_unpack.default: _matrices(f"{_EACH}, ... k! -> ... n! p!, ... n! k!, ... k! m!"),
    aten.linalg_ldl_factor_ex.default: _matrices(f"{_EACH} -> {_EACH}, ... n!, ..."),
    aten.linalg_pinv.atol_rtol_tensor: _matrices(f"{_EACH} -> ... m! n!"),
    aten._linalg_solve_ex.default: _solving(0, 1, f", {_EACH}, ... n!, ..."),
    aten.linalg_solve_triangular.default: _solving(0, 1),
    aten.triangular_solve.default: _solving(1, 0, f", {_EACH}"),
    aten.cholesky_solve.default: _solving(1, 0),
    aten.linalg_lu_solve.default: _solving(0, 2),
    aten.linalg_ldl_solve.default: _solving(0, 2),
}
if hasattr(aten, "cholesky"):  # gone in PyTorch 2.15
    RULES[aten.cholesky.default] = _matrices(f"{_EACH} -> {_EACH}")
