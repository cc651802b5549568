"""Sequence parallelism between tensor-parallel blocks: the outputs of norms split by tokens.

    all-reduce  ->  residual, norm on every token       becomes
    reduce-scatter  ->  residual, norm on a part of the tokens  ->  all-gather

It moves as many bytes, and each rank keeps a part of the activations between the blocks.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, 4.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from tutti.planner.placement.reduced import ReducedStep

# (batch, tokens, width)
_NUM_DIMS = 3
_TOKENS = 1


def token_splits(step: ReducedStep, axis: str, ways: int) -> dict[str, str]:
    """Entries of `place` that split the outputs of norms by tokens, by module of the reduced step.

    A norm is a module whose parameters have one dim, that of the last dim of its output.
    """
    sizes = _widths(step)
    found = {}
    for node in step.captured.graph.nodes:
        for module in node.meta.get("output_of", ()):
            if module in sizes and _splits(node, sizes[module], ways):
                found[module] = f"-, {axis}, -"
    return found


def _widths(step: ReducedStep) -> Mapping[str, int]:
    """By module whose every parameter has one dim the size of that."""
    found: dict[str, int] = {}
    others = set()
    for name, node in step.captured.placeholders.items():
        if step.captured.kinds[name] == "parameter":
            module, shape = name.rpartition(".")[0], node.meta["val"].shape
            found.setdefault(module, shape[-1] if len(shape) else 0)
            if len(shape) != 1 or shape[0] != found[module]:
                others.add(module)
    return {module: size for module, size in found.items() if module and module not in others}


def _splits(node: fx.Node, width: int, ways: int) -> bool:
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or val.ndim != _NUM_DIMS or node.meta.get("region") != "forward":
        return False
    return val.shape[-1] == width and val.shape[_TOKENS] % ways == 0
