"""What a partitioned program does, in words: where state lives, every collective and why."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, fx

from tutti.comm.failure import format_nbytes
from tutti.graph import text
from tutti.graph.boundary import boundary
from tutti.layout import Sharding
from tutti.partition.partition import Program
from tutti.planner.memory import predict
from tutti.report.memory import memory_text
from tutti.report.table import columns


@dataclass(frozen=True)
class Record:
    """One collective: what it does to which value, for whom, and the bytes each rank sends and holds.

    `dtype` is short (`f32`): what is moved, where a sum over ranks is wider than the value.
    `nbytes` is what each rank moves by a bandwidth-optimal algorithm on its group.
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


def records(program: Program) -> list[Record]:
    """Every collective of the program, in order."""
    return [_record(program, node) for node in program.collectives]


def _record(program: Program, node: fx.Node) -> Record:
    value: fx.Node = node.meta["value"]
    user: fx.Node = node.meta["user"]
    operand: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    axes: tuple[str, ...] = node.args[1]  # type: ignore[assignment]
    n = program.mesh.size(axes)
    result: Tensor = node.meta["val"]
    full = max(operand.nbytes, result.nbytes)
    factor = {"all_reduce": 2 * (n - 1) / n}.get(node.target.__name__, (n - 1) / n)  # type: ignore[union-attr]
    source = user.meta.get("forward_source") or user.meta.get("source") or _source(value)
    return Record(
        kind=node.target.__name__,  # type: ignore[union-attr]
        axes=axes,
        value=_value_name(program, value, user),
        cause=_cause(program, value, user),
        source=source,
        region=user.meta.get("region", "output"),
        shape=tuple(operand.shape),
        dtype=_dtype(operand),
        nbytes=int(full * factor),
    )


def _dtype(x: Tensor) -> str:
    return text.SHORT.get(x.dtype, str(x.dtype))


def _source(node: fx.Node) -> str:
    return node.meta.get("forward_source") or node.meta.get("source") or ""


def _value_name(program: Program, value: fx.Node, user: fx.Node) -> str:
    if value.meta.get("name"):
        return value.meta["name"]
    kind = program.plan.boundaries.get(user)
    if kind is not None and kind.parameter:
        return kind.parameter  # the weight, cast before it is gathered
    updates = dict(zip(program.captured.output[1], program.captured.updated, strict=True))
    if value in updates:
        return f"new {updates[value]}"
    module = value.meta.get("module") or ""
    return f"{text.op_name(value)}{f' of {module}' if module else ''}"


def _cause(program: Program, value: fx.Node, user: fx.Node) -> str:
    """Why the value had to lie otherwise."""
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


def explain(
    program: Program,
    *,
    tensor: str | None = None,
    graph: bool = False,
    measured: int | None = None,
    run: fx.Graph | None = None,
) -> str:
    """The layout table, the memory and the collectives; with `tensor` (a name pattern) where its sharding
    came from, with `graph` the partitioned graph. `measured`: bytes that a call was seen to take. `run`:
    the graph as it runs here, where that is known."""
    if tensor is not None:
        return "\n".join(_provenance(program, tensor))
    memory = memory_text(predict(program, run), measured)
    parts = [_header(program), _layout_table(program), memory, _collectives_table(program)]
    if program.fallbacks:
        parts.append("no rule, operands gathered whole:\n  " + "\n  ".join(program.fallbacks))
    if graph:
        parts.append(text.text(program.graph))
    return "\n\n".join(parts)


def _header(program: Program) -> str:
    mesh = program.mesh
    return f'layout "{program.layout}": {mesh.num_ranks} ranks, mesh {mesh or "of one rank"}'


def _layout_table(program: Program) -> str:
    rows, total, whole = [], 0, 0
    for state in program.captured.state:
        storage = program.storage[state.name]
        compute = program.plan.compute.get(state.name)
        itemsize = state.tensor.element_size()
        nbytes = math.prod(storage.local_shape(program.mesh)) * itemsize
        total += nbytes
        whole += state.tensor.numel() * itemsize
        rows.append(
            (
                state.name,
                _dtype(state.tensor),
                str(list(state.tensor.shape)),
                _short(storage),
                _short(compute) if compute else "",
                format_nbytes(nbytes),
                program.plan.reasons.get(state.name, ""),
            )
        )
    head = ("state", "dtype", "shape", "stored", "computed", "per rank", "")
    last = f"in all {format_nbytes(total)} per rank of {format_nbytes(whole)}"
    return f"{columns(head, rows)}\n{last}"


def _short(sharding: Sharding) -> str:
    return (
        ", ".join(
            "*".join("+".join(seg.axes) or "-" for seg in dim) or "-" for dim in sharding.dims
        )
        or "-"
    )


def _collectives_table(program: Program) -> str:
    grouped: dict[tuple[str, ...], list[Record]] = {}
    for r in records(program):
        cause = r.cause.partition(" (")[0]
        key = (os.path.basename(r.source), r.region, r.kind, r.dtype, "+".join(r.axes), cause)
        grouped.setdefault(key, []).append(r)
    rows = [
        (*key, str(len(found)), format_nbytes(sum(r.nbytes for r in found)))
        for key, found in grouped.items()
    ]
    everything = [r for found in grouped.values() for r in found]
    head = ("line", "region", "collective", "dtype", "over", "cause", "count", "bytes sent")
    last = (
        f"{len(everything)} collectives a step, "
        f"{format_nbytes(sum(r.nbytes for r in everything))} sent by each rank"
    )
    return f"{columns(head, rows)}\n{last}" if rows else "no collectives"


def _provenance(program: Program, pattern: str) -> list[str]:
    """For each tensor that matches: its sharding and the chain of nodes that each axis came along."""
    spread, found = program.plan.spread, []
    for node in program.captured.graph.nodes:
        name = node.meta.get("name") or node.name
        if not (fnmatchcase(name, pattern) or fnmatchcase(node.meta.get("module") or "", pattern)):
            continue
        wanted = spread.of(node)
        marks = [
            m
            for m, kind in program.plan.boundaries.items()
            if kind.parameter and kind.parameter == node.meta.get("name")
        ]
        target = marks[0] if marks else node
        wanted = spread.of(target) if marks else wanted
        stored = program.storage.get(name)
        if (wanted is None and stored is None) or node.target is boundary:
            continue
        found.append(f"{name}: {wanted or 'whole'}" + (f"  (stored {stored})" if stored else ""))
        target = spread.alias.get(target, target)
        for axis in sorted(wanted.axes) if wanted else ():
            found += [f"  {axis}: {step}" for step in _chain(program, target, axis)]
    return found or [f'no tensor with a sharding matches "{pattern}"']


def _chain(program: Program, node: fx.Node, axis: str) -> list[str]:
    spread, steps = program.plan.spread, []
    seen: set[fx.Node] = set()
    while node not in seen:
        seen.add(node)
        via = spread.origin.get((node, axis))
        if via is None or isinstance(via, str):
            mark = program.plan.boundaries.get(node)
            name = (mark and mark.parameter) or node.meta.get("name") or node.name
            steps.append(f"from {name}: {via or 'given'}")
            break
        where = os.path.basename(_source(via))
        steps.append(f"by {text.op_name(via)} at {where}")
        following = [
            x
            for x in (*via.all_input_nodes, via, *via.users)
            if x not in seen and (s := spread.of(x)) is not None and axis in s.axes
        ]
        following = [
            x for x in following if spread.origin.get((spread.alias.get(x, x), axis)) is not via
        ]
        if not following:
            break
        node = spread.alias.get(following[0], following[0])
    return steps
