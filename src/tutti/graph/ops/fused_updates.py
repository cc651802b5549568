"""PyTorch's fused optimizer kernels as ops of a graph: `tutti::adamw(params, grads, ...) -> new values`.

    adamw([%w], [%g], [%m], [%v], [], [%t], lr=%lr, beta1=0.9, ...) -> [w', m', v']

One op per kernel of `KERNELS`. Operands are lists of tensors, one entry per parameter; results are the
new values of the lists that the kernel writes, one list after the other. A captured graph has one call
per parameter; passes join them. Numbers may be inputs of the graph. `steps` already count this step.

Each op has two forms that overwrite instead: `tutti::adamw_`, which a trace records, and
`Kernel.overwriting`, which a finished program calls, and which returns the overwritten tensors; where nothing
uses these the program calls its `silent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tutti.torch_private.op_tables import OpOverload, has_kernel

Lists = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Kernel:
    """One kernel: its lists of tensors in order, those that it writes, its numbers and its switches.

    `constants` are arguments of PyTorch's function with the same value at every captured step.
    """

    name: str
    lists: tuple[str, ...]
    written: tuple[int, ...]
    numbers: tuple[str, ...]
    switches: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...] = ()

    @property
    def fused_name(self) -> str:
        """PyTorch's name of the kernel."""
        return f"_fused_{self.name}_"

    @property
    def op(self) -> OpOverload:
        """The functional op."""
        return getattr(torch.ops.tutti, self.name).default

    @property
    def recorded(self) -> OpOverload:
        """The op that overwrites and returns nothing."""
        return getattr(torch.ops.tutti, f"{self.name}_").default

    @cached_property
    def overwriting(self) -> Callable[..., list[Tensor]]:
        """The function that overwrites, with the results of the functional op."""

        def overwrite(*lists: Sequence[Tensor], **numbers: Any) -> list[Tensor]:
            self.overwrite(*lists, **numbers)
            return list(chain.from_iterable(lists[k] for k in self.written))

        overwrite.__name__ = f"{self.name}_"
        overwrite.written = self.written  # type: ignore[attr-defined]
        overwrite.silent = self.overwrite  # type: ignore[attr-defined]
        return overwrite

    def overwrite(self, *operands: Sequence[Tensor], **numbers: Any) -> None:
        """Run PyTorch's kernel, which assumes equal strides of all tensors of a parameter."""
        fused, numbers = _FUSED[self.name], {**numbers, **dict(self.constants)}
        lists = self._with_counts_of_float32(operands)
        if all(map(Tensor.is_contiguous, chain.from_iterable(lists))):
            fused(*lists, **numbers)
            return
        columns = [_alike([xs[i] for xs in lists if xs]) for i in range(len(lists[0]))]
        given = [iter(c) for c in columns]
        alike = [[next(g) for g in given] if xs else [] for xs in lists]
        fused(*alike, **numbers)
        for k in self.written:
            for x, made in zip(lists[k], alike[k], strict=True):
                if made is not x:
                    x.copy_(made)

    def _with_counts_of_float32(self, lists: Sequence[Any]) -> Sequence[Any]:
        """A GPU's kernel reads counts as float32 without a look at their dtype; a CPU's converts them."""
        if "steps" not in self.lists:
            return lists
        k = self.lists.index("steps")
        if all(x.is_cpu for x in lists[k][:1]) or all(x.dtype == torch.float32 for x in lists[k]):
            return lists
        return [*lists[:k], [x.float() for x in lists[k]], *lists[k + 1 :]]

    def one_by_one(self, lists: Sequence[Any]) -> Iterator[tuple[list[list[Any]], list[Any]]]:
        """For each parameter its own lists, and the tensors of them that the kernel writes."""
        for i in range(len(lists[0])):
            mine = [[xs[i]] if xs else [] for xs in lists]
            yield mine, [x for k in self.written for x in mine[k]]

    def has(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether PyTorch has this kernel for tensors of `device` and `dtype`."""
        key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
        if key is None or dtype not in _DTYPES:
            return False
        return has_kernel(f"aten::{self.fused_name}", key)


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ADAM = (
    ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps"),
    (0, 2, 3, 4),
    ("lr", "beta1", "beta2", "weight_decay", "eps"),
    ("amsgrad", "maximize"),
)
KERNELS = (
    Kernel("adam", *_ADAM),
    Kernel("adamw", *_ADAM),
    Kernel(
        "sgd",
        ("params", "grads", "momentum_buffers"),
        (0, 2),
        ("weight_decay", "momentum", "lr", "dampening"),
        ("nesterov", "maximize"),
        (("is_first_step", False),),
    ),
    Kernel(
        "adagrad",
        ("params", "grads", "sums", "steps"),
        (0, 2),
        ("lr", "lr_decay", "weight_decay", "eps"),
        ("maximize",),
    ),
)

# Looked up once: capture replaces these functions while it traces.
_FUSED: dict[str, Callable[..., Any]] = {k.name: getattr(torch, k.fused_name) for k in KERNELS}


def _alike(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of one parameter; copies of those whose strides differ from the parameter's."""
    dense = torch.empty_like(tensors[0])  # keeps strides where they leave no gaps
    return [
        x if x.stride() == dense.stride() or x.dim() == 0 else torch.empty_like(dense).copy_(x)
        for x in tensors
    ]


_LIBRARY = torch.library.Library("tutti", "FRAGMENT")


def _register(kernel: Kernel) -> None:
    marks = [f"(x{k}!)" if k in kernel.written else "" for k in range(len(kernel.lists))]
    lists = ", ".join(f"Tensor[] {n}" for n in kernel.lists)
    overwritten = ", ".join(f"Tensor{m}[] {n}" for m, n in zip(marks, kernel.lists, strict=True))
    # `Scalar`, since a symbol given as `float` would become a constant.
    rest = [f"Scalar {n}" for n in kernel.numbers] + [f"bool {n}" for n in kernel.switches]
    numbers = ", ".join(rest)
    _LIBRARY.define(f"{kernel.name}({lists}, *, {numbers}) -> Tensor[]")
    _LIBRARY.define(f"{kernel.name}_({overwritten}, *, {numbers}) -> ()")

    def new(*lists: Sequence[Tensor], **numbers: Any) -> list[Tensor]:
        own = [[x.clone() for x in xs] if k in kernel.written else xs for k, xs in enumerate(lists)]
        return kernel.overwriting(*own, **numbers)

    def fake(*lists: Sequence[Tensor], **numbers: Any) -> list[Tensor]:
        return [torch.empty_like(x) for k in kernel.written for x in lists[k]]

    def fake_overwrite(*lists: Sequence[Tensor], **numbers: Any) -> None:
        return None

    _LIBRARY.impl(kernel.name, new, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{kernel.name}_", kernel.overwrite, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tutti::{kernel.name}", fake, lib=_LIBRARY)
    torch.library.register_fake(f"tutti::{kernel.name}_", fake_overwrite, lib=_LIBRARY)


for _kernel in KERNELS:
    _register(_kernel)

BY_OP: dict[Any, Kernel] = {k.op: k for k in KERNELS}
BY_RECORDED: dict[Any, Kernel] = {k.recorded: k for k in KERNELS}
