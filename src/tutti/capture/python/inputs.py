"""The inputs of a step in its trace: fakes for tensors, symbols for numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.read_places import Site
from tutti.capture.python.read_values import Symbols
from tutti.capture.python.sizes import FreeSizes
from tutti.graph.players.device import device_of
from tutti.torch_private.fake_tensors import FakeTensorMode, SizedFakeMode
from tutti.torch_private.quick_fakes import QuickFakeMode
from tutti.torch_private.symbolic import ConstantSource, DimDynamic


def fake_mode(assumed: Assumed, loops: set[Site], *, sized: bool) -> FakeTensorMode:
    """The fake mode of a trace that takes the branches of `assumed`, with known `loops`.

    With `sized`, sizes are symbols.
    """
    kind = SizedFakeMode if sized else QuickFakeMode
    return kind(shape_env=Symbols(assumed, loops), static_shapes=True, allow_non_fake_inputs=True)


def fake(x: Tensor, mode: FakeTensorMode, shape: Sequence[Any] | None = None) -> Tensor:
    """A fake of the same global shape (or of `shape`), dtype and device; contiguous."""
    sizes = tuple(x.shape if shape is None else shape)
    with mode:
        made = torch.empty(sizes, dtype=x.dtype, device=device_of(x))
    return made.requires_grad_(x.requires_grad)


def fakes(tensors: Sequence[Tensor], mode: FakeTensorMode, free: FreeSizes | None) -> list[Tensor]:
    """Fakes of a batch's tensors, with symbols for `free` sizes."""
    if free is None:
        return [fake(x, mode) for x in tensors]
    shapes = free.symbolic([x.shape for x in tensors], mode)
    return [fake(x, mode, shape) for x, shape in zip(tensors, shapes, strict=True)]


def symbol(name: str, value: float, mode: FakeTensorMode) -> Any:
    """A symbol for a number."""
    source, env = ConstantSource(name), mode.shape_env
    assert env is not None
    if isinstance(value, int):
        made = env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        return env.create_symintnode(made, hint=value, source=source)
    # By default PyTorch gives equal numbers one symbol.
    made = env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    return env.create_symfloatnode(made, hint=value, source=source)
