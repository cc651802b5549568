"""A sample call of an op: small shapes that show its rule, and check it.

The same samples (`rules.samples`) fill `docs/rules.md` and the tests, so the tests check every rule on
the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tutti.torch_private.fake_tensors import FakeTensorMode

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """The description of a tensor: its shape, its dtype, and the function that fills it from a generator."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[tuple[int, ...], torch.Generator], Tensor]

    def made(self, generator: torch.Generator) -> Tensor:
        """Fresh random values."""
        return self.fill(self.shape, generator).to(self.dtype)


def f(*shape: int) -> Operand:
    """Normal, float64."""
    return Operand(
        shape, torch.float64, lambda s, g: torch.randn(s, generator=g, dtype=torch.float64)
    )


def unread(*shape: int) -> Operand:
    """NaN, float64: for an operand that the op ignores."""
    return Operand(shape, torch.float64, lambda s, g: torch.full(s, torch.nan, dtype=torch.float64))


def half(*shape: int) -> Operand:
    """Normal, float16, for the fused attention of a GPU."""
    return Operand(shape, torch.float16, lambda s, g: torch.randn(s, generator=g))


def single(*shape: int) -> Operand:
    """Normal, float32."""
    return Operand(shape, torch.float32, lambda s, g: torch.randn(s, generator=g))


def positive(*shape: int) -> Operand:
    """Uniform in [0.25, 0.75), float64: inside the domain of logarithms, roots and probabilities."""
    return Operand(
        shape,
        torch.float64,
        lambda s, g: torch.rand(s, generator=g, dtype=torch.float64) / 2 + 0.25,
    )


def ints(high: int, *shape: int) -> Operand:
    """Whole numbers in [0, high)."""
    return Operand(shape, torch.int64, lambda s, g: torch.randint(0, high, s, generator=g))


def some(high: int, ignored: int, *shape: int) -> Operand:
    """Class numbers in [0, high), a third of them `ignored`."""

    def fill(s: tuple[int, ...], g: torch.Generator) -> Tensor:
        left_out = torch.rand(s, generator=g) < 0.34
        return torch.randint(0, high, s, generator=g).masked_fill(left_out, ignored)

    return Operand(shape, torch.int64, fill)


def distinct(high: int, *shape: int) -> Operand:
    """Distinct whole numbers in [0, high) along the first dim, the same in every column."""

    def fill(s: tuple[int, ...], g: torch.Generator) -> Tensor:
        order = torch.randperm(high, generator=g)[: s[0]]
        return order.reshape(s[0], *[1] * (len(s) - 1)).expand(s).contiguous()

    return Operand(shape, torch.int64, fill)


def ordered(size: int) -> Operand:
    """A rising row, float64."""
    return Operand(
        (size,),
        torch.float64,
        lambda s, g: torch.randn(s, generator=g, dtype=torch.float64).sort()[0],
    )


def definite(*shape: int) -> Operand:
    """Symmetric positive definite matrices, float64."""

    def fill(s: tuple[int, ...], g: torch.Generator) -> Tensor:
        root = torch.randn(s, generator=g, dtype=torch.float64)
        return root @ root.mT + s[-1] * torch.eye(s[-1], dtype=torch.float64)

    return Operand(shape, torch.float64, fill)


def regular(*shape: int) -> Operand:
    """Well-conditioned matrices that differ from their transposes, float64."""

    def fill(s: tuple[int, ...], g: torch.Generator) -> Tensor:
        eye = torch.eye(s[-1], dtype=torch.float64)
        return torch.randn(s, generator=g, dtype=torch.float64) + s[-1] * eye

    return Operand(shape, torch.float64, fill)


def pivots(*shape: int) -> Operand:
    """Pivot rows as LAPACK counts them: from 1, each at or after its own row."""

    def fill(s: tuple[int, ...], g: torch.Generator) -> Tensor:
        own = torch.arange(s[-1])
        return own + 1 + (torch.rand(s, generator=g) * (s[-1] - own)).long()

    return Operand(shape, torch.int32, fill)


def pairs(*shape: int) -> Operand:
    """Complex numbers, both parts normal."""
    return Operand(
        shape,
        torch.complex128,
        lambda s, g: torch.randn(s, generator=g, dtype=torch.complex128),
    )


def flags(*shape: int) -> Operand:
    """True or false, evenly."""
    return Operand(shape, torch.bool, lambda s, g: torch.rand(s, generator=g) < 0.5)


@dataclass(frozen=True, eq=False)
class Sample:
    """One call: `op(*args, **kwargs)` with `Operand`s in place of its tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(_spelled, (*self.args, *self.kwargs.values())))})"

    def operands(self) -> list[Operand]:
        """The tensors of the call in argument order, as `rule.operands_of` gives them."""
        found: list[Operand] = []
        _mapped((self.args, list(self.kwargs.values())), lambda o: found.append(o))
        return found

    def call(self, tensors: list[Any]) -> Any:
        """The call on the given tensors."""
        args, kwargs = self._with(tensors)
        return self.op(*args, **kwargs)

    def node(self, mode: FakeTensorMode, device: str = "cpu") -> fx.Node:
        """The call as a node of a fresh graph, its operands placeholders with fake values."""
        graph, inputs = fx.Graph(), []
        for i, operand in enumerate(self.operands()):
            x = graph.placeholder(f"x{i}")
            with mode:
                x.meta["val"] = torch.empty(operand.shape, dtype=operand.dtype, device=device)
            inputs.append(x)
        args, kwargs = self._with(inputs)
        node = graph.call_function(self.op, args, kwargs)
        with mode, torch.no_grad():
            node.meta["val"] = self.call([x.meta["val"] for x in inputs])
        return node

    def _with(self, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = iter(tensors)
        args = _mapped(self.args, lambda _: next(given))
        return args, {k: _mapped(v, lambda _: next(given)) for k, v in self.kwargs.items()}


def _mapped(x: Any, change: Callable[[Operand], Any]) -> Any:
    if isinstance(x, Operand):
        return change(x)
    if isinstance(x, list | tuple):
        return type(x)([_mapped(y, change) for y in x])
    return x


def _spelled(x: Any) -> str:
    if isinstance(x, Operand):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(_spelled, x))}]"
    return str(x)


def overload(name: str) -> Any:
    """The ATen op of `name`, the default overload where none is given."""
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


def sample(name: str, *args: Any, **kwargs: Any) -> Sample:
    """A call of the ATen op `name`."""
    return Sample(overload(name), args, kwargs)
