"""The axes that a plan tries for a step, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tutti.propagate.batch_dim import has_sequence
from tutti.torch_private.pytrees import tree_flatten

_MOST_PIPE = 64
_STACKED = 3  # dims of a weight of stacked experts: experts, rows, columns


@dataclass(frozen=True)
class TriedAxes:
    """What a plan varies.

    names: of axes. most: the largest size of an axis. inner: of the product of `tensor`, `seq` and `expert`.
    not_tried: a sentence for each axis left out.
    """

    names: tuple[str, ...]
    most: tuple[tuple[str, int], ...]
    inner: int
    not_tried: tuple[str, ...]


def tried_axes(
    model: nn.Module, batch: tuple[Any, ...], place: Mapping[str, str], host_size: int
) -> TriedAxes:
    """The axes that can have an effect on a step.

    Args:
        model: trained by it, also on the meta device.
        batch: of a call.
        place: the user's; an axis that it names is tried.
        host_size: devices of a host. Axes that exchange values within each layer stay inside of one.
    """
    texts = ",".join(place.values()).replace("+", ",")
    named = {word.strip() for word in texts.split(",")}
    experts, tokens = max(_stacked(model), default=1), max(_lengths(batch), default=1)
    sizes = {"tensor": host_size, "pipe": min(_MOST_PIPE, _most_stages(model))}
    names, not_tried = ["data", "pipe", "tensor"], list[str]()
    for axis, size, lacks in (
        ("seq", tokens, "no tensor of the batch has a dim of tokens"),
        ("expert", experts, "no weight stacks experts"),
    ):
        if size > 1 or axis in named:
            names.append(axis)
            sizes[axis] = host_size if axis in named else min(host_size, size)
        else:
            not_tried.append(f"{axis} is not tried: {lacks}")
    return TriedAxes(tuple(names), tuple(sizes.items()), host_size, tuple(not_tried))


def _stacked(model: nn.Module) -> Iterator[int]:
    """How many experts each weight of three dims may stack; a kernel of a convolution is none."""
    for module in model.modules():
        if not isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            for p in module.parameters(recurse=False):
                if p.ndim == _STACKED:
                    yield int(p.shape[0])


def _lengths(batch: tuple[Any, ...]) -> Iterator[int]:
    """Tokens of a sample, of each tensor that `seq` splits."""
    for x in tree_flatten(batch)[0]:
        if isinstance(x, Tensor) and has_sequence(x):
            yield int(x.shape[1])


def _most_stages(model: nn.Module) -> int:
    """Modules with parameters of their own: a cut needs one for each stage."""
    return sum(1 for m in model.modules() if next(m.parameters(recurse=False), None) is not None)
