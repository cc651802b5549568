"""Pointwise kernels that PyTorch compiles from a few lines of C++ when a GPU first runs them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.cuda import jiterator


def jit_kernel(code: str, **numbers: float) -> Callable[..., Tensor]:
    """The kernel of a C++ template of one type, with the defaults of its last parameters.

    It takes tensors that broadcast, of one dtype, and numbers by their names.
    Why: the hash of random numbers is nine ops, each of which reads and writes the whole tensor. Public: the
    function is documented, but has no public name.
    """
    make: Any = jiterator._create_jit_fn
    return make(code, **numbers)
