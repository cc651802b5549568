"""A record for each collective of a program: its kind, its value, its cause, and its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from tutti.costs.graph_seconds import collective_call
from tutti.graph import text
from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import loop
from tutti.partition.partition import Program
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed


@dataclass(frozen=True)
class Record:
    """One collective: its kind, its value, its user, and the bytes each rank sends and holds.

    `dtype` is short (`f32`): that of the moved data, which for a sum over ranks may be wider than the value.
    `nbytes` is the traffic of each rank by a bandwidth-optimal algorithm on its group, for each of the
    `times` that it runs in a step: once a micro-batch inside a loop. Of slots of experts it is the traffic if
    rows choose their experts evenly. `pipe_rank` is the pipeline rank of its
    ranks.
    """

    kind: str
    axes: tuple[str, ...]
    value: str
    cause: str
    source: str
    region: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    times: int = 1
    pipe_rank: int = 0


def records(program: Program, made: Timed | None = None) -> list[Record]:
    """Every collective of the program, in order; with `micro` or `pipe`, those of each pipeline rank in turn.

    `made` is the program split in time, if known. Sums over micro-batches move nothing.
    """
    if not program.layout.in_time:
        return [_record(program, node) for node in program.collectives]
    found = []
    for pipe_rank, one in enumerate((made or in_time(program)).programs):
        for node, times in _with_times(one.graph):
            found.append(replace(_record(program, node), times=times, pipe_rank=pipe_rank))
    return found


def _with_times(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """The collectives of a graph and of its loops, and how often each runs in a step."""
    for node in graph.nodes:
        if node.target in collectives.COLLECTIVES:
            yield node, 1
        elif node.target is loop:
            body: Any = node.args[0]
            plays = Counter((do.stage, do.kind) for do in body.row if not do.way)
            for key, part in body.parts.items():
                yield from ((n, plays[key] * times) for n, times in _with_times(part.graph))


def num_sent(graph: fx.Graph) -> int:
    """How many collectives a final graph carries out in a step, joined ones as one."""
    count = 0
    for node in graph.nodes:
        if node.target is loop:
            body: Any = node.args[0]
            parts = [part for part in body.played if part is not None]
            count += sum(num_sent(p.graph if p.adding is None else p.adding) for p in parts)
        elif node.target is not collectives.meet:
            count += collective_call(node) is not None
    return count


def _record(program: Program, node: fx.Node) -> Record:
    value: fx.Node = node.meta["value"]
    user: fx.Node = node.meta["user"]
    operand: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    axes: tuple[str, ...] = node.args[1]  # type: ignore[assignment]
    n = program.mesh.size(axes)
    result: Tensor = node.meta["val"]
    full = max(operand.nbytes, result.nbytes)
    factor = {"all_reduce": 2 * (n - 1) / n}.get(node.target.__name__, (n - 1) / n)  # type: ignore[union-attr]
    source = source_of(user) or source_of(value)
    return Record(
        kind=node.target.__name__,  # type: ignore[union-attr]
        axes=axes,
        value=_value_name(program, value, user),
        cause=_cause(program, value, user),
        source=source,
        region=user.meta.get("region", "output"),
        shape=tuple(operand.shape),
        dtype=dtype_text(operand),
        nbytes=int(full * factor),
    )


def dtype_text(x: Tensor) -> str:
    """Short, such as `f32`."""
    return text.SHORT.get(x.dtype, str(x.dtype))


def _value_name(program: Program, value: fx.Node, user: fx.Node) -> str:
    if value.meta.get("name"):
        return value.meta["name"]
    kind = program.plan.boundaries.get(user)
    if kind is not None and kind.parameter:
        return kind.parameter  # the weight, cast before the gather
    updates = dict(zip(program.captured.output[1], program.captured.updated, strict=True))
    if value in updates:
        return f"new {updates[value]}"
    module = value.meta.get("module") or ""
    return f"{text.op_name(value)}{f' of {module}' if module else ''}"


def _cause(program: Program, value: fx.Node, user: fx.Node) -> str:
    """The cause of the value's reshard."""
    kind = program.plan.boundaries.get(user)
    if kind is not None and kind.parameter:
        return f"weight for the {kind.into}"
    if kind is not None:
        return f"gradient into the update{_parameter_of(program, user)}"
    if user.op == "output":
        return "stored as the layout says" if value in program.captured.output[1] else "returned"
    module = user.meta.get("module") or ""
    return f"for {text.op_name(user)}{f' of {module}' if module else ''}"


def _parameter_of(program: Program, mark: fx.Node) -> str:
    """The parameter that a gradient belongs to: the first whose new value depends on it alone."""
    names = dict(zip(program.captured.output[1], program.captured.updated, strict=True))
    seen, queue = {mark}, [mark]
    while queue:
        node = queue.pop(0)
        if node in names and names[node].startswith("optim."):
            return f" ({names[node].removeprefix('optim.').rpartition('.')[0]})"
        if node in names:
            return f" ({names[node]})"
        shape = mark.meta["val"].shape
        for user in node.users:
            val = user.meta.get("val")
            values = val if isinstance(val, list | tuple) else [val]
            alike = any(isinstance(x, Tensor) and x.shape == shape for x in values)
            if user not in seen and alike:
                seen.add(user)
                queue.append(user)
    return ""
