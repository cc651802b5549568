"""`rows`: computes on tensors of several leading dims as rows, the form that matmuls take.

    %5 = mm(%x, %w)                               %5 = mm(%x, %w)
    %6 = reshape(%5, [8, 128, 512])
    %7 = gelu(%6)                          ->     %7 = gelu(%5)
    %8 = reshape(%7, [1024, 512])
    %9 = mm(%8, %v)                               %9 = mm(%7, %v)

Ops that treat each row alike (element by element, or over the last dim) give the same bits in either form.
The pass converts connected nodes of this kind together, if that saves more reshapes than it adds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import is_pointwise, written
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.layout import Segment, Sharding
from tutti.torch_private.op_tables import OpOverload

aten = torch.ops.aten
_NORMS = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)
_OVER_LAST = (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default)
_ELEMENTWISE = (aten._to_copy.default, collectives.all_reduce)

Lead = tuple[int, ...]


def rows(graph: fx.Graph) -> int:
    """Rewrite `graph`; returns the number of reshapes saved."""
    leads = {node: lead for node in graph.nodes if (lead := _lead(node)) is not None}
    saved = 0
    turned: dict[Any, Tensor] = {}
    for group in _groups(leads):
        lead = leads[group[0]]
        gain = _Group(graph, group, lead, turned)
        if gain.saved > 0:
            gain.turn()
            saved += gain.saved
    return saved


def _lead(node: fx.Node) -> Lead | None:
    """The leading dims of the values that `node` treats row by row; None for another node."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        several: Any = node.args[0]
        return _lead(several)
    is_op = isinstance(node.target, OpOverload) and not written(node)
    if not (is_op or node.target in _ELEMENTWISE) or "out" in node.kwargs:
        return None
    found = _lead_of_values(node)
    if found is None or not all(_fits(x, found) for x in node.all_input_nodes):
        return None
    if node.target in _NORMS:
        sizes: Any = node.args[1 if node.target is _NORMS[0] else 2]
        return found if len(sizes) == 1 else None
    if node.target in _OVER_LAST:
        return found if _reduced(node, len(found)) is not None else None
    return found if _elementwise(node) else None


def _lead_of_values(node: fx.Node) -> Lead | None:
    """The leading dims of the operand with the most dims."""
    most = max((x for x in node.all_input_nodes), key=_num_dims, default=None)
    if most is None or _num_dims(most) < 3:
        return None
    return tuple(most.meta["val"].shape[:-1])


def _num_dims(x: fx.Node) -> int:
    val = x.meta.get("val")
    return val.dim() if isinstance(val, Tensor) else 0


def _fits(x: fx.Node, lead: Lead) -> bool:
    """Whether an operand can be converted, or broadcasts to each row unchanged."""
    val = x.meta.get("val")
    if not isinstance(val, Tensor):
        return isinstance(val, int | float)
    if _is_turned(val, lead):
        return val.is_contiguous()
    repeated = val.dim() == 2 and val.shape[0] == lead[-1] == math.prod(lead)
    return val.dim() <= 1 or repeated


def _is_turned(val: Tensor, lead: Lead) -> bool:
    return val.dim() == len(lead) + 1 and tuple(val.shape[:-1]) == lead


def _elementwise(node: fx.Node) -> bool:
    target: Any = node.target
    if target in _ELEMENTWISE:
        return set(node.kwargs) <= {"dtype"}
    if not is_pointwise(target) or node.kwargs.get("memory_format"):
        return False
    val = node.meta.get("val")
    wide = max(x.meta["val"].shape[-1] for x in node.all_input_nodes if _num_dims(x))
    return isinstance(val, Tensor) and val.is_contiguous() and val.shape[-1] == wide


def _reduced(node: fx.Node, num_lead: int) -> list[int] | None:
    """The dims of a reduction on rows, if it is over the last dim and keeps it, or over all others."""
    dims, keep = (*node.args[1:], False)[:2]
    if not isinstance(dims, list | tuple):
        return None
    over = sorted(d % (num_lead + 1) for d in dims)  # type: ignore[operator]
    if keep and over == [num_lead]:
        return [1]
    # A sum over rows: they are contiguous in memory in either form.
    rows_only = node.target is aten.sum.dim_IntList and over == list(range(num_lead))
    return [0] if rows_only and not keep else None


def _groups(leads: dict[fx.Node, Lead]) -> Iterator[list[fx.Node]]:
    """Connected nodes whose values have the same leading dims, in the order of the graph."""
    above: dict[fx.Node, fx.Node] = {node: node for node in leads}

    def top(node: fx.Node) -> fx.Node:
        while above[node] is not node:
            above[node] = above[above[node]]
            node = above[node]
        return node

    for node, lead in leads.items():
        for x in node.all_input_nodes:
            several = node.target is operator.getitem
            if leads.get(x) == lead and (several or _is_turned(x.meta["val"], lead)):
                above[top(node)] = top(x)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in leads:
        found.setdefault(top(node), []).append(node)
    yield from found.values()


class _Group:
    """Nodes to convert together.

    given: values from elsewhere to convert for them.
    saved: reshapes that this removes, minus those that it adds.
    turned: fakes as rows by their old form, for all groups.
    """

    def __init__(
        self, graph: fx.Graph, nodes: list[fx.Node], lead: Lead, turned: dict[Any, Tensor]
    ) -> None:
        self.graph, self.lead, self.turned = graph, lead, turned
        self.nodes = dict.fromkeys(nodes)
        operands = (x for node in nodes for x in node.all_input_nodes)
        self.given = list(
            dict.fromkeys(x for x in operands if x not in self.nodes and self._turns(x))
        )
        self.made = [n for n in nodes if self._turns(n)]
        self.saved = sum(map(self._saved_before, self.given)) + sum(
            map(self._saved_behind, self.made)
        )

    def _turns(self, node: fx.Node) -> bool:
        val = node.meta.get("val")
        return isinstance(val, Tensor) and _is_turned(val, self.lead)

    def _saved_before(self, x: fx.Node) -> int:
        alone = all(user in self.nodes for user in x.users)
        if x.target is not aten.reshape.default:
            return -1
        return int(alone) - int(not self._is_rows(x.args[0], x))

    def _saved_behind(self, node: fx.Node) -> int:
        views, plain = self._elsewhere(node)
        return sum(self._is_rows(view, node) for view in views) - int(bool(plain))

    def _elsewhere(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Users of `node` that stay: its reshapes, and others."""
        users = [user for user in node.users if user not in self.nodes]
        views = [user for user in users if user.target is aten.reshape.default]
        return views, [user for user in users if user not in views]

    def _is_rows(self, x: Any, like: fx.Node) -> bool:
        """Whether `x` is `like` as rows: the same elements with one leading dim."""
        shape = (math.prod(self.lead), like.meta["val"].shape[-1])
        return isinstance(x.meta["val"], Tensor) and tuple(x.meta["val"].shape) == shape

    def turn(self) -> None:
        """Rewrite the nodes, with their operands and results as rows."""
        before = {node: node.meta["val"] for node in self.made}
        shardings = {n: n.meta["sharding"] for n in self.nodes if "sharding" in n.meta}
        turned = {x: self._turned(x) for x in self.given}
        for node in self.nodes:
            node.args = fx.map_arg(node.args, lambda x: turned.get(x, x))  # type: ignore[assignment]
            node.kwargs = fx.map_arg(node.kwargs, lambda x: turned.get(x, x))
            if node.target in _OVER_LAST:
                over: Any = _reduced(node, len(self.lead))
                node.args = (node.args[0], over, *node.args[2:])
            node.meta["val"] = self._value(node.meta["val"])
            if node in shardings:
                node.meta["sharding"] = self._sharding(shardings[node])
        for node in self.made:
            self._give(node, before[node], shardings.get(node))
        for x in self.given:
            if not x.users and x.op == "call_function" and x.target is aten.reshape.default:
                self.graph.erase_node(x)

    def _turned(self, x: fx.Node) -> fx.Node:
        """`x` as rows."""
        source: Any = x.args[0] if x.target is aten.reshape.default else x
        if source is not x and self._is_rows(source, x):
            return source
        sharding = self._sharding(x.meta.get("sharding"))
        return self._reshape(source, self._value(x.meta["val"]), x, sharding)

    def _give(self, node: fx.Node, before: Tensor, sharding: Any) -> None:
        """Let the users of `node` in its old form take rows, or a view in that form."""
        views, plain = self._elsewhere(node)
        if plain:  # before the removal of views: one of these users may take rows, too
            back = self._reshape(node, before, node, sharding)
            for user in plain:
                user.replace_input_with(node, back)
        for view in views:
            if self._is_rows(view, node):
                view.replace_all_uses_with(node)
                self.graph.erase_node(view)

    def _reshape(self, source: fx.Node, val: Tensor, like: fx.Node, sharding: Any) -> fx.Node:
        inputs = like.op == "placeholder"
        place = self.graph.inserting_before(next(iter(self.nodes))) if inputs else None
        with place or self.graph.inserting_after(like):
            node = self.graph.call_function(aten.reshape.default, (source, list(val.shape)))
        node.meta = {k: like.meta[k] for k in NOTES if k in like.meta} | {"val": val}
        if sharding is not None:
            node.meta["sharding"] = sharding
        return node

    def _value(self, val: Any) -> Any:
        if isinstance(val, list | tuple):
            return type(val)(map(self._value, val))
        if not isinstance(val, Tensor) or not _is_turned(val, self.lead):
            return val
        form = val.shape, val.stride(), val.dtype, val.device
        if form not in self.turned:
            self.turned[form] = val.reshape(math.prod(self.lead), val.shape[-1])
        return self.turned[form]

    def _sharding(self, sharding: Any) -> Any:
        """The leading dims in one; an unsplit segment joins the one to its left."""
        if not isinstance(sharding, Sharding) or len(sharding.dims) != len(self.lead) + 1:
            return sharding
        joined: list[Segment] = []
        for seg in (seg for dim in sharding.dims[:-1] for seg in dim):
            if joined and not seg.axes:
                joined[-1] = Segment(joined[-1].size * seg.size, joined[-1].axes)
            else:
                joined.append(seg)
        return Sharding((tuple(joined), sharding.dims[-1]), sharding.partial)
