"""Ops whose kernels misread operands that are not contiguous in memory, or views of conjugates.

A graph has values, not memory: `x.contiguous()` is the value `x`, so an operand may have other strides than
in the user's step. Most kernels read any strides. The kernels listed here raise, or return wrong numbers in
silence: eager PyTorch, or the user, makes their operands contiguous first.
`tests/graph/ops/test_memory_order.py` tries every op that has a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# These index memory as if a tensor had no gaps and its last dim varied fastest; determinants factor the
# transpose of a contiguous matrix, else the matrix.
_CONTIGUOUS = (
    "view_as_complex nll_loss2d_backward native_layer_norm_backward native_group_norm "
    "native_group_norm_backward _weight_norm_interface _weight_norm_interface_backward "
    "adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward "
    "linalg_matrix_exp _linalg_det _linalg_slogdet"
)
# These read rows: any strides, but 1 in the last dim.
_ROWS = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"
)


def with_rows(x: Tensor) -> Tensor:
    """`x`, or a copy of it whose last dim lies without gaps."""
    return x if x.ndim == 0 or x.stride(-1) == 1 else x.contiguous()


def _overloads(names: str, order: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    packets = [getattr(aten, name) for name in names.split() if hasattr(aten, name)]
    return {packet.default: order for packet in packets}


ORDERS: dict[Any, Callable[[Tensor], Tensor]] = {
    **_overloads(_CONTIGUOUS, Tensor.contiguous),
    **_overloads(_ROWS, with_rows),
    # A kernel may return a view of conjugates: `torch.fft.ifft` of real numbers.
    **_overloads("view_as_real", Tensor.resolve_conj),
}


def order_for(target: Any, operand: Any) -> Callable[[Tensor], Tensor] | None:
    """The function that puts the value of the node `operand` in the order that `target` reads; None if any
    order is right."""
    is_tensor = isinstance(operand, fx.Node) and isinstance(operand.meta.get("val"), Tensor)
    return ORDERS.get(target) if is_tensor else None


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target(*args, **kwargs)`, with tensors in the order that it reads."""
    if (order := ORDERS.get(target)) is not None:
        args = tuple(order(x) if isinstance(x, Tensor) else x for x in args)
        kwargs = {k: order(x) if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    return target(*args, **kwargs)
