"""Writes of a first trace that need no functionalization: a new value takes the name of the old.

    t = aten.t(w)                  # a view, read before the write only
    y = aten.mm(x, t)
    g = aten.detach(d)             # the same elements as d
    aten.mul_(d, c)                # d1 = aten.mul(d, c); from here on, d and g are d1
    tutti.adamw_([w], [g], ...)    # w1, m1, v1 = tutti.adamw([w], [d1], ...); w ends as w1

That is right if a write covers a whole tensor, and every other view of its memory either has no later reader
or shows the same elements. `functionalize` handles all other writes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tutti.capture.second_trace.sharing import MemorySharing, Writers, is_tensor, written
from tutti.graph.ops.fused_updates import BY_RECORDED
from tutti.graph.ops.overloads import counterpart, name_of
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.op_tables import OpOverload, schema_of
from tutti.torch_private.storages import memory_id

aten = torch.ops.aten
_WHOLE = (aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)
_NEVER = -1


@dataclass
class Overwrites:
    """The writes to record as new values.

    values: for each such node, a fake of each new tensor, in order.
    renamed: for each such node, the nodes whose value each new tensor replaces from there on.
    ends: the inputs with a new value at the end.
    memory: the representatives (`MemorySharing.of`) of memory to which only such nodes write.
    """

    values: dict[fx.Node, list[Any]] = field(default_factory=dict)
    renamed: dict[fx.Node, list[list[fx.Node]]] = field(default_factory=dict)
    ends: list[fx.Node] = field(default_factory=list)
    memory: set[fx.Node] = field(default_factory=set)


def overwrites(
    graph: fx.Graph,
    memory: MemorySharing,
    mode: FakeTensorMode,
    replayed: Callable[[Any], bool],
    writers: Writers,
) -> Overwrites:
    """The writes of a trace that cover whole tensors without a later read through another view.

    `replayed` and `writers` are those of `verbatim.copyable`.
    """
    nodes = list(graph.nodes)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(memory.of(node), []).append(node)
    last = _last_reads(nodes)
    place = {node: i for i, node in enumerate(nodes)}

    def same_later(node: fx.Node, x: fx.Node) -> list[fx.Node] | None:
        """The nodes of x's memory with reads after `node`, if all of them equal x; else None."""
        later = [
            m for m in members[memory.of(x)] if place[m] <= place[node] < last[m] and m is not node
        ]
        return later if all(_is_same(m, x) for m in later) else None

    found, others = Overwrites(), set[fx.Node]()
    targets: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        whole = [] if replayed(node.target) or node.target in writers else _covered(node)
        if whole:
            targets[node] = whole
        else:
            others |= {memory.of(x) for x in written(node, writers)}
    others |= {memory.of(n) for n in nodes if n.op == "get_attr"}
    pending = dict(targets)
    for node, whole in targets.items():
        renamed = [same_later(node, x) for x in whole]
        values = None if None in renamed else _values(node, whole, mode)
        if values is None or len({memory.of(x) for x in whole}) < len(whole):
            del pending[node]
            others |= {memory.of(x) for x in whole}
        else:
            found.values[node], found.renamed[node] = values, renamed  # type: ignore[assignment]
    # `functionalize` handles memory with one other write, and all else that its writers write.
    while rest := [n for n in pending if any(memory.of(x) in others for x in targets[n])]:
        for node in rest:
            del pending[node], found.values[node], found.renamed[node]
            others |= {memory.of(x) for x in targets[node]}
    found.memory = {memory.of(x) for node in pending for x in targets[node]}
    found.ends = [n for n in nodes if n.op == "placeholder" and memory.of(n) in found.memory]
    return found


def _last_reads(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """The position of the last node that reads each; the end reads inputs."""
    last = {n: len(nodes) if n.op == "placeholder" else _NEVER for n in nodes}
    for i, node in enumerate(nodes):
        for x in node.all_input_nodes:
            last[x] = max(last[x], i)
    return last


def _covered(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node overwrites whole; empty if it may not."""
    target = node.target
    if target in BY_RECORDED:
        return [x for _, old in BY_RECORDED[target].one_by_one(node.args) for x in old]
    if not isinstance(target, OpOverload) or not schema_of(target).name.endswith("_"):
        return []
    tags = target.tags
    if torch.Tag.inplace_view in tags or not (torch.Tag.pointwise in tags or target in _WHOLE):
        return []
    changed = list(written(node, {}))
    return changed if _functional(target) is not None and changed == [node.args[0]] else []


def _functional(target: OpOverload) -> OpOverload | None:
    """The functional form of an op whose name ends with `_`."""
    return counterpart(target, name_of(target).removesuffix("_"))


def _values(node: fx.Node, whole: list[fx.Node], mode: FakeTensorMode) -> list[Any] | None:
    """Fakes of the new values, in new memory; None if one differs in form from the overwritten tensor."""
    with mode, torch.no_grad():
        if node.target in BY_RECORDED:  # results of the update, and the tensors that receive them
            return [torch.empty_like(x.meta["val"]) for x in (*whole, *whole)]
        given: Any = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        args, kwargs = given
        value = _functional(node.target)(*args, **kwargs)  # type: ignore[misc, arg-type]
    old = whole[0].meta["val"]
    if not isinstance(value, Tensor) or value.dtype != old.dtype or value.shape != old.shape:
        return None
    return [value] if _strides(value) == _strides(old) else None


def _strides(x: Tensor) -> list[int]:
    """The strides of the dims with several elements: views depend on them."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size != 1]


def _is_same(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes with shared memory show the same elements of it."""
    if not is_tensor(a) or not is_tensor(b):
        return False
    x, y = a.meta["val"], b.meta["val"]
    return (
        memory_id(x) == memory_id(y)
        and x.dtype == y.dtype
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.storage_offset() == y.storage_offset()
        and x.is_conj() == y.is_conj()
        and x.is_neg() == y.is_neg()
    )


def rewritten(
    node: fx.Node, values: list[Any], graph: fx.Graph, become: Callable[[fx.Node], Any]
) -> list[fx.Node]:
    """The nodes of `graph` with the new values; `become` gives the replacement of an operand."""

    def call(target: Any, *args: Any, val: Any, **kwargs: Any) -> fx.Node:
        packet = getattr(target, "overloadpacket", target)
        name = packet.__name__
        made = graph.create_node("call_function", target, args, kwargs, name=name)
        made.meta = {k: x for k, x in node.meta.items() if k != "tensor_meta"} | {"val": val}
        return made

    mapped: Any = map_arg((node.args, node.kwargs), become)
    args, kwargs = mapped
    if node.target not in BY_RECORDED:
        return [call(_functional(node.target), *args, val=values[0], **kwargs)]  # type: ignore[arg-type]
    kernel, found = BY_RECORDED[node.target], []
    given, copied = iter(values[: len(values) // 2]), iter(values[len(values) // 2 :])
    for mine, old in kernel.one_by_one(args):
        vals = [next(given) for _ in old]
        made = call(kernel.op, *mine, val=vals, **kwargs)
        new = [call(operator.getitem, made, j, val=val) for j, val in enumerate(vals)]
        pairs = zip(old, new, strict=True)
        found += [call(aten.copy.default, x, one, val=next(copied)) for x, one in pairs]
    return found
