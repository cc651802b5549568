"""Matmuls by oneDNN, on processors for which PyTorch's BLAS has no kernels of full width.

    tutti::onednn_matmul(x, weight, bias=None) -> x @ weight.T + bias

with x (..., k), weight (n, k) and bias (n,). `torch.mm` in float32 calls MKL, which runs AVX2 kernels on
processors that are not Intel's, whatever their instructions; oneDNN, also a part of PyTorch, chooses by the
instructions. Sums are float32 in both, in another order.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.torch_private.op_tables import OpOverload

_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_LIBRARY.define("onednn_matmul(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_ONEDNN: Any = torch.ops.mkldnn
_CPU_INFO = Path("/proc/cpuinfo")


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dtype == torch.float64:  # a comparison in float64 runs the same graph
        return torch.nn.functional.linear(x, weight, bias)
    if bias is not None:
        bias = bias.contiguous()  # oneDNN's op assumes a contiguous bias
    return _ONEDNN._linear_pointwise(x, weight, bias, "none", (), None)


def _fake_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LIBRARY.impl("onednn_matmul", _matmul, "CompositeExplicitAutograd")
torch.library.register_fake("tutti::onednn_matmul", _fake_matmul, lib=_LIBRARY)

# Its own name in the text of a graph, to differ from `aten.matmul`.
matmul = torch.ops.tutti.onednn_matmul.default


def onednn_linear() -> OpOverload:
    """oneDNN's op; takes `(x, weight, bias, "none", (), None)`: all float32, the bias contiguous."""
    return _ONEDNN._linear_pointwise.default


def is_faster() -> bool:
    """Whether oneDNN's matmuls are faster here: PyTorch's BLAS is MKL, and the processor has AVX-512 but is
    not Intel's. False under `torch.backends.mkldnn.flags(enabled=False)`."""
    backends: Any = torch.backends
    return (
        backends.mkldnn.is_available()
        and backends.mkldnn.enabled
        and backends.mkl.is_available()
        and hasattr(_ONEDNN, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _vendor() not in ("", "GenuineIntel")
    )


@cache
def _vendor() -> str:
    if not _CPU_INFO.exists():
        return ""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", _CPU_INFO.read_text(), re.MULTILINE)
    return found[1] if found else ""
