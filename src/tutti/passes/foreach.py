"""`foreach`: joins equal element-by-element ops of the update, on many parameters, into ops over lists.

    %4 = mul(%a, 0.9)           %4 = _foreach_mul([%a, %b], 0.9)
    %5 = add(%4, %g)            %8 = _foreach_add([item(%4, 0), item(%4, 1)], [%g, %h])
    %6 = mul(%b, 0.9)      ->
    %7 = add(%6, %h)

PyTorch's optimizers do that on a GPU, where a kernel costs more than its launch only on large tensors. On a
CPU a list is a loop, and all intermediate values at once cost memory: there, the pass joins only step counts.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.edits.edit import NOTES
from tutti.rules.families.pointwise import is_pointwise

aten = torch.ops.aten
DEVICES = ("cuda",)

# Op and kinds of its arguments (x: like the result, s: one value for all, n: a number) -> op over lists.
_LISTS: dict[tuple[Any, str], Any] = {
    (aten.add.Tensor, "xx"): aten._foreach_add.List,
    (aten.add.Tensor, "xs"): aten._foreach_add.Tensor,
    (aten.sub.Tensor, "xx"): aten._foreach_sub.List,
    (aten.mul.Tensor, "xx"): aten._foreach_mul.List,
    (aten.mul.Tensor, "xs"): aten._foreach_mul.Tensor,
    (aten.mul.Tensor, "xn"): aten._foreach_mul.Scalar,
    (aten.div.Tensor, "xx"): aten._foreach_div.List,
    (aten.div.Tensor, "xs"): aten._foreach_div.Tensor,
    (aten.div.Tensor, "xn"): aten._foreach_div.Scalar,
    (aten.addcmul.default, "xxx"): aten._foreach_addcmul.Scalar,
    (aten.addcdiv.default, "xxx"): aten._foreach_addcdiv.Scalar,
    (aten.lerp.Scalar, "xxn"): aten._foreach_lerp.Scalar,
    (aten.lerp.Tensor, "xxx"): aten._foreach_lerp.List,
    (aten.maximum.default, "xx"): aten._foreach_maximum.List,
    (aten.minimum.default, "xx"): aten._foreach_minimum.List,
    (aten.pow.Tensor_Scalar, "xn"): aten._foreach_pow.Scalar,
    (aten.sqrt.default, "x"): aten._foreach_sqrt.default,
    (aten.rsqrt.default, "x"): aten._foreach_rsqrt.default,
    (aten.reciprocal.default, "x"): aten._foreach_reciprocal.default,
    (aten.neg.default, "x"): aten._foreach_neg.default,
    (aten.abs.default, "x"): aten._foreach_abs.default,
    (aten.sign.default, "x"): aten._foreach_sign.default,
}
# These take `alpha` in one form only, and addcmul and addcdiv their `value` by position.
_PLAIN: dict[tuple[Any, str], Any] = {
    (aten.add.Tensor, "xn"): aten._foreach_add.Scalar,
    (aten.sub.Tensor, "xn"): aten._foreach_sub.Scalar,
}


def foreach(graph: fx.Graph, *, devices: Collection[str] = DEVICES) -> int:
    """Rewrite `graph`; returns the number of ops merged into others. `devices` are the types to rewrite.

    It joins ops of equal op, numbers, dtype, device and level, the largest number of joinable ops on a path
    to them: so none needs another's result, and the levels give a valid order of the graph.
    """
    count = _join_counts(graph)
    levels = _levels(graph, devices)
    groups: dict[Any, list[fx.Node]] = {}
    for node, (level, key) in levels.items():
        if key is not None:
            groups.setdefault((level, key), []).append(node)
    several = [members for members in groups.values() if len(members) > 1]
    if several:
        _put_in_order(graph, levels)
    for members in several:
        _join(graph, members)
        count += len(members) - 1
    return count


def _join_counts(graph: fx.Graph) -> int:
    """Join ops on single numbers of the state alone: all may run at the position of the first."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        key = _key(node)
        tensors = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
        if (
            key is None
            or node.meta["val"].dim()
            or any(x.op != "placeholder" for x in node.all_input_nodes)
        ):
            continue
        if len(tensors) == 1:
            groups.setdefault(key, []).append(node)
    several = [members for members in groups.values() if len(members) > 1]
    for members in several:
        _join(graph, members)
    return sum(len(members) - 1 for members in several)


def _levels(graph: fx.Graph, devices: Collection[str]) -> dict[fx.Node, tuple[int, Any]]:
    """For each call its level, itself included, and its key if it is joinable."""
    found: dict[fx.Node, tuple[int, Any]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        level = max((found[x][0] for x in node.all_input_nodes), default=0)
        key = _key(node)
        if key is not None and (node.meta["val"].device.type not in devices or not _goes_on(node)):
            key = None
        found[node] = (level + (key is not None), key)
    return found


def _goes_on(node: fx.Node) -> bool:
    """Whether an element-by-element op or the output uses it: squares only for sums would cost memory."""
    return any(u.op == "output" or is_pointwise(u.target) for u in node.users)


def _key(node: fx.Node) -> Any:
    """The key that joined ops share; None without an op over lists."""
    val = node.meta.get("val")
    if node.meta.get("region") != "update" or not isinstance(val, Tensor):
        return None
    kinds = "".join(_kind(a, val) for a in node.args)
    target = _over_lists(node, kinds)
    if target is None or not val.is_floating_point():
        return None
    same = [a for a, kind in zip(node.args, kinds, strict=True) if kind != "x"]
    rest = tuple(sorted(node.kwargs.items()))
    return target, kinds, tuple(same), rest, val.dtype, val.device


def _kind(argument: Any, val: Tensor) -> str:
    x = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    if not isinstance(x, Tensor):
        return "n" if isinstance(x, int | float | torch.SymFloat | torch.SymInt) else "?"
    if x.dtype != val.dtype or x.device != val.device:
        return "?"
    return "x" if x.shape == val.shape else "s" if x.dim() == 0 else "?"


def _over_lists(node: fx.Node, kinds: str) -> Any:
    if (node.target, kinds) in _PLAIN:
        return None if node.kwargs else _PLAIN[node.target, kinds]
    return _LISTS.get((node.target, kinds))


def _put_in_order(graph: fx.Graph, levels: dict[fx.Node, tuple[int, Any]]) -> None:
    """Sort by level, with joined ops first in each level, otherwise in the old order."""
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    place = calls[0].prev
    for node in sorted(calls, key=lambda n: (levels[n][0], levels[n][1] is None)):
        place.append(node)
        place = node


def _join(graph: fx.Graph, members: list[fx.Node]) -> None:
    """Put one op over lists at the position of the first of `members`, and an item for each."""
    first = members[0]
    target, kinds, _, rest, _, _ = _key(first)
    args = [
        [m.args[i] for m in members] if kind == "x" else first.args[i]
        for i, kind in enumerate(kinds)
    ]
    options = dict(rest)
    if "value" in options:
        args.append(options.pop("value"))
    elif target in (aten._foreach_addcmul.Scalar, aten._foreach_addcdiv.Scalar):
        args.append(1)
    notes = {k: first.meta[k] for k in NOTES if k in first.meta}
    with graph.inserting_before(first):
        joined = graph.call_function(target, tuple(args), options)
        joined.meta = {**notes, "val": [m.meta["val"] for m in members]}
        for i, member in enumerate(members):
            item = graph.call_function(operator.getitem, (joined, i))
            item.meta = dict(member.meta)
            member.replace_all_uses_with(item)
    for member in members:
        graph.erase_node(member)
