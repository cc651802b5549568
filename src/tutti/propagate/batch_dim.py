"""The dim of samples of each tensor of the batch, and the axes that split it.

    one first dim               all tensors are split
    several                     those of the first tensor's; others where they leave the step whole
    read by the update alone    not split
    does not divide by an axis  not split over that axis: each of its ranks computes all of it

A split of an input is free, as every rank has the whole batch; so is its use as a whole.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.errors import ShardingError
from tutti.graph.analysis.cost import seconds_of
from tutti.layout import Layout, Mesh, Sharding
from tutti.torch_private.pytrees import tree_flatten
from tutti.user_lines import users_level

# The axes that split the samples, major to minor; `replica` if workers share a program.
BATCH_AXES = ("replica", "data", "micro")
# The share of forward and backward computed whole on each rank of `data`, above which others are tried.
MOST_WHOLE = 0.5

# The argument of `tutti.distribute`: a dim for all tensors, or one per argument; None for "no samples".
BatchDim = int | None | Sequence[Any] | Mapping[Any, Any]
# By the name of an input; None without samples.
Dims = dict[str, int | None]


class Unsplit(NamedTuple):
    """The reason not to split the samples of a batch over an axis."""

    name: str
    size: int
    axis: str
    ways: int


def candidates(captured: Captured) -> list[Dims]:
    """The ways to find samples by dim 0: by the first tensor's size, by each other size, by all at once."""
    every = {n: int(node.meta["val"].shape[0]) for n, node in _tensors(captured)}
    late = _read_late(captured) & every.keys()
    sizes = {n: size for n, size in every.items() if n not in late}
    whole: Dims = dict.fromkeys(late)
    groups = list(dict.fromkeys(sizes.values()))
    found: list[Dims] = [
        {n: 0 if s == size else None for n, s in sizes.items()} | whole for size in groups
    ]
    return [*found, dict.fromkeys(sizes, 0) | whole] if len(groups) > 1 else found or [whole]


def _read_late(captured: Captured) -> set[str]:
    """The tensors of the batch that no forward and no backward computes with, and new state depends on: the
    noise of a private update.

    They hold no samples, whatever their sizes. A batch to validate the new weights does.
    """
    named = {node: name for name, node in _tensors(captured)}
    read: dict[fx.Node, frozenset[str]] = {}  # "" for any other input
    early = set[str]()
    for node in captured.graph.nodes:
        found = frozenset[str]().union(*(read[x] for x in node.all_input_nodes))
        if node.op == "placeholder":
            found = frozenset({named.get(node, "")})
        elif node.op == "output":
            early.update(named[x] for x in node.all_input_nodes if x in named)
        elif node.meta.get("region") != "update" and len(found) > 1:
            early |= found
        read[node] = found
    late = frozenset[str]().union(*(read[x] for x in captured.output[1]))
    return {name for name in late - early if name}


def batch_axes(mesh: Mesh, *, with_experts: bool) -> tuple[str, ...]:
    """The axes that may split the samples, major to minor.

    `expert` is one if rows move to the ranks of their experts: its ranks then share the rest of the step.
    """
    return (*BATCH_AXES, "expert") if with_experts and "expert" in mesh else BATCH_AXES


def split_of(
    name: str,
    val: Tensor,
    dim: int,
    mesh: Mesh,
    layout: Layout,
    among: Sequence[str] = BATCH_AXES,
) -> tuple[tuple[str, ...], Unsplit | None]:
    """The axes, of those `among`, over which the samples split, and the reasons against the others.

    Raises `ShardingError` if they do not divide by the workers that share a program: each takes its own
    rows of the batch.
    """
    size = left = int(val.shape[dim])
    axes, unsplit = [], None
    for axis in (a for a in among if a in mesh):
        ways = mesh.size(axis)
        if left % ways == 0:
            axes.append(axis)
            left //= ways
        elif axis == "replica":
            raise ShardingError(
                f'cannot split dim {dim} of "{name}" (size {size}) over axis "replica" (size {ways})',
                at=f"batch tensor {name.partition('.')[2]}",
                why=f'layout "{layout}" gives each worker its rows of the batch',
                fix=f"a batch size that {ways} divides ({-(-size // ways) * ways}), as by drop_last=True",
            )
        elif axis != "expert":  # its ranks compute other experts anyway
            unsplit = unsplit or Unsplit(name, left, axis, ways)
    return tuple(axes), unsplit


def whole_share(
    graph: fx.Graph, wanted: Callable[[fx.Node], Sharding | None], regions: frozenset[str]
) -> float:
    """The share of forward and backward, by predicted time, in nodes that `data` does not split."""
    whole = total = 0.0
    for node in graph.nodes:
        if node.meta.get("region") not in regions:
            continue
        seconds = seconds_of(node)
        around = [wanted(x) for x in (node, *node.all_input_nodes)]
        total += seconds
        whole += seconds * (not any(s is not None and "data" in s.axes for s in around))
    return whole / total if total else 0.0


def micro_of(layout: Layout, sizes: Sequence[int]) -> Layout:
    """The layout with the largest `micro` up to its own that divides each rank's samples."""
    ways = math.prod(
        layout.program_mesh.size(a) for a in ("replica", "data") if a in layout.program_mesh
    )
    rest = [n // ways if n % ways == 0 else n for n in sizes]
    if layout.micro == 1 or not rest or all(n % layout.micro == 0 for n in rest):
        return layout
    return layout.with_micro(
        max(k for k in range(1, layout.micro + 1) if all(n % k == 0 for n in rest))
    )


def dims_of(told: BatchDim, step: Callable[..., Any], batch: Sequence[Any], *, first: int) -> Dims:
    """The dims of samples from `batch_dim`, by tensor of a batch: `batch.0`, ... in the order of its leaves.

    Args:
        told: the argument of `tutti.distribute`.
        step: the training step, whose parameters a mapping names.
        batch: its arguments from `first` on.

    Raises:
        ShardingError: for an unknown argument, or a dim that a tensor lacks.
    """
    if isinstance(told, Mapping):
        names = _parameters(step)[first:]
        unknown = [k for k in told if k not in names and k not in range(len(batch))]
        if unknown:
            raise ShardingError(
                f"batch_dim: the step has no argument {unknown[0]!r}",
                fix="its arguments are "
                + ", ".join(names[: len(batch)] or map(str, range(len(batch)))),
            )
        each = [
            told.get(k, told.get(n, 0))
            for k, n in zip(range(len(batch)), [*names, *[""] * len(batch)], strict=False)
        ]
    elif isinstance(told, Sequence) and not isinstance(told, str):
        if len(told) != len(batch):
            raise ShardingError(
                f"batch_dim has {len(told)} entries, the step was called with {len(batch)} arguments",
                fix="one entry for each argument, None for one that holds no samples",
            )
        each = list(told)
    else:
        each = [told] * len(batch)
    found: Dims = {}
    for one, argument in zip(each, batch, strict=True):
        for x, dim in _leaves(one, argument):
            if isinstance(x, Tensor):
                found[f"batch.{len(found)}"] = _checked(dim, x, len(found))
    return found


def has_sequence(x: Tensor) -> bool:
    """Whether dim 1 is likely of tokens: of integers (samples, tokens), or of (samples, tokens, features)."""
    return x.ndim == 3 or (x.ndim == 2 and not x.is_floating_point())


def why_unsplit(unsplit: Unsplit) -> str:
    """The reason in the table of `explain`."""
    return f"{unsplit.size} samples do not divide by {unsplit.axis}={unsplit.ways}: each rank computes all"


def warn_of_uneven(unsplit: Sequence[Unsplit]) -> None:
    """Warn, once for a shape, of the cost of a batch that does not divide."""
    for name, size, axis, ways in unsplit[:1]:
        warnings.warn(
            f"the {size} samples of {_called(name)} do not divide by {axis}={ways}: every rank computes all "
            "of them, in the time of one device; DataLoader(drop_last=True) leaves such a batch "
            "out, and a size that divides splits it",
            stacklevel=users_level(),
        )


def warn_of_micro(asked: int, found: int) -> None:
    """Warn that a batch runs in fewer slices, which take more memory."""
    if asked != found:
        warnings.warn(
            f"micro={asked} does not divide each rank's samples, or the chunks of them that the step cuts: "
            f"each rank takes them in {found} "
            f"{'slice' if found == 1 else 'slices'}, which takes more memory; DataLoader(drop_last=True) "
            "leaves such a batch out",
            stacklevel=users_level(),
        )


def warn_of_whole(share: float, captured: Captured, dims: Dims, ways: int) -> None:
    """Warn of the tensors that are not split, if most of a step is not."""
    shapes = {n: list(node.meta["val"].shape) for n, node in _tensors(captured)}
    split = [f"{_called(n)} {shapes[n]}" for n, d in dims.items() if d is not None and n in shapes]
    rest = [f"{_called(n)} {shapes[n]}" for n in shapes if dims.get(n) is None]
    warnings.warn(
        f"data={ways} splits {', '.join(split) or 'no tensor of the batch'}, and {share:.0%} of the step's "
        f"forward and backward does not depend on that: every rank works it out whole. Not split: "
        f"{', '.join(rest) or 'nothing'}. distribute(..., batch_dim=...) tells which dim of each argument "
        "holds the samples, None for one without",
        stacklevel=users_level(),
    )


def _called(name: str) -> str:
    return f"batch tensor {name.partition('.')[2]}"


def _tensors(captured: Captured) -> Iterator[tuple[str, fx.Node]]:
    for name, node in captured.placeholders.items():
        if captured.kinds[name] == "batch" and node.meta["val"].ndim:
            yield name, node


def _parameters(step: Callable[..., Any]) -> list[str]:
    """The names of its positional arguments."""
    try:
        found = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]


def _leaves(told: Any, argument: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of an argument with the dim told for each: for all of it, or for each of its parts."""
    if isinstance(told, Mapping) and isinstance(argument, Mapping):
        for key, x in argument.items():
            yield from _leaves(told.get(key, 0), x)
    elif isinstance(told, list | tuple) and isinstance(argument, list | tuple):
        for one, x in zip(told, argument, strict=True):
            yield from _leaves(one, x)
    else:
        yield from ((x, told) for x in tree_flatten(argument)[0])


def _checked(dim: Any, x: Tensor, k: int) -> int | None:
    if dim is None or not x.ndim:
        return None
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ShardingError(
            f"batch_dim={dim!r} of batch tensor {k}, which has shape {list(x.shape)}",
            fix="the dim that holds the samples, or None",
        )
    return dim % x.ndim
