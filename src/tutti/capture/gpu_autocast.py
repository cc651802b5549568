"""`precision=bf16` as on a GPU, for a step captured on a CPU: a plan for GPUs counts their casts.

    pow, layer_norm, softmax, sum, ...      float32 on a GPU; on a CPU the dtype of the operand

PyTorch's lists for CUDA have more ops in float32 than those for CPUs. A GPT-2 whose GELU calls `pow` computes
most of it in float32 on a GPU, in bfloat16 on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tutti.graph.ops.overloads import arguments_of
from tutti.torch_private.autocast_kernels import autocast_on_cpu
from tutti.torch_private.op_tables import has_kernel
from tutti.torch_private.pytrees import tree_map

aten = torch.ops.aten
# PyTorch, torch.amp, "CUDA Ops that can autocast to float32", by what they do to their operands.
_CAST = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar"
    " pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm"
    " frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp"
    " upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"
    " upsample_trilinear3d upsample_bicubic2d norm.Scalar norm.ScalarOpt_dim"
)
_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm"
    " sum sum.dim_IntList"
)


@contextmanager
def gpu_lists() -> Iterator[None]:
    """Inside, autocast on a CPU computes in float32 what it does on a GPU."""
    with autocast_on_cpu(_kernels()):
        yield


@functools.cache
def _kernels() -> dict[str, Callable[..., Any]]:
    """By the name of an op; a build for CPUs knows the lists of GPUs, and versions differ."""
    found: dict[str, Callable[..., Any]] = {}
    for names, how in ((_CAST, _with_cast), (_RESULT, _with_dtype)):
        for name in names.split():
            on_gpu, on_cpu = (has_kernel(f"aten::{name}", f"Autocast{d}") for d in ("CUDA", "CPU"))
            if on_gpu and not on_cpu:
                packet, _, overload = name.partition(".")
                op = getattr(getattr(aten, packet), overload or "default")
                found[name] = functools.partial(how, op)
    return found


def _with_cast(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The op on operands in float32."""
    args, kwargs = tree_map(lambda x: x.float() if _is_short(x) else x, (args, kwargs))
    with _without_autocast():
        return op(*args, **kwargs)


def _with_dtype(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The op with a result in float32, unless the call asks for a dtype."""
    given = arguments_of(op, args, kwargs)
    if given["dtype"] is None and _is_short(given["self"]):
        given["dtype"] = torch.float32
    with _without_autocast():
        return op(**given)


def _is_short(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)


@contextmanager
def _without_autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", True)
