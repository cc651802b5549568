"""Rows that a step sorts by their experts, for `grouped_mm`, in the order in which they were.

    %2, %3 = sort(%e)                                    by the experts %e of S rows, k of each token
    %4 = index(%x, [floor_divide(%3, k)])                %4 = each row of %x k times
    %5 = sorted_experts(cumsum(histc(%2)))
    %6 = expert_mm(%4, %w, %5)                    ->     %6 = expert_mm(%4, %w, %e)
    %7 = index_put(zeros, [%3], arange(S))
    %8 = index(%6, [%7])                                 %8 = %6

If every op between treats each row by itself, sorts it back, or adds rows up, then the order of the rows
changes no result but the rounding of sums. A sort needs the rows of all samples; in their first order rows
stay with their samples. The backward writes and reads gradients of rows by the same indices.

If the step does something else with sorted rows, `sorted_experts` stays, and `refuse_sorted` raises.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.spelling.expert_products import cast_like, peeled
from tutti.graph.analysis.aliases import is_pointwise
from tutti.graph.edits.edit import Editor, Emit, erase_dead, shaped, source_of
from tutti.graph.ops.expert_rows import PRODUCTS, expert_mm, expert_outer
from tutti.graph.ops.sorted_experts import grouped_rows_refused, sorted_experts
from tutti.user_lines import quoted

aten = torch.ops.aten
_SORTS = (aten.sort.default, aten.sort.stable)
_SUMS = (aten.histc.default, aten.cumsum.default, aten._to_copy.default)


def put_rows_back(editor: Editor) -> int:
    """Rewrite what belongs to each such sort; the number of sorts."""
    graph = editor.graph
    if not graph.find_nodes(op="call_function", target=sorted_experts):
        return 0
    erase_dead(graph)
    count = 0
    for target in _SORTS:
        for node in graph.find_nodes(op="call_function", target=target):
            if len(shape(node.args[0])) != 1 or not _is_ascending(node):
                continue
            rows = _SortedRows(editor, node)
            if rows.are_put_back():
                rows.write()
                count += 1
    if count:
        erase_dead(graph)
        _turn_weights(editor)
    return count


def refuse_sorted(graph: fx.Graph) -> None:
    """Raise for a matmul of groups of rows that have no known order."""
    for node in graph.find_nodes(op="call_function", target=sorted_experts):
        raise grouped_rows_refused(quoted(source_of(node)))


class _SortedRows:
    """The values of the rows that one sort has put in another order.

    order: the position of each row before the sort. tokens: that position divided by the rows of a token.
    inverse: the position of each row after the sort. moved: values of rows in the order of the sort.
    """

    def __init__(self, editor: Editor, sort: fx.Node) -> None:
        self.editor, self.sort = editor, sort
        self.given: Any = sort.args[0]
        (self.num_rows,) = shape(self.given)
        self.order: set[fx.Node] = set()
        self.tokens: dict[fx.Node, int] = {}
        self.inverse: set[fx.Node] = set()
        self.moved: dict[fx.Node, None] = {}
        self.counts: set[fx.Node] = set()
        self.experts: set[fx.Node] = set()
        self.new: dict[fx.Node, str] = {}  # how each node on the border is written

    def are_put_back(self) -> bool:
        """Whether no reader of these values depends on their order."""
        known = {self.sort}
        for node in self.editor.graph.nodes:
            if not any(x in known for x in node.all_input_nodes):
                continue
            if not self._is_known(node):
                return False
            if self._is_of_sort(node):
                known.add(node)
        return bool(self.experts)

    def _is_of_sort(self, node: fx.Node) -> bool:
        sets = (self.order, self.tokens, self.inverse, self.moved, self.counts, self.experts)
        return any(node in one for one in sets)

    def _is_known(self, node: fx.Node) -> bool:
        target, args = node.target, node.args
        if target is operator.getitem and args[0] is self.sort:
            (self.order.add if args[1] == 1 else self._move)(node)
            return True
        if target in (aten.index.Tensor, aten.index_put.default):
            return self._is_lookup(node)
        if target is sorted_experts:
            self.experts.add(node)
            return bool(args[1] == self.num_rows) and self._ends_groups(args[0])
        if target in PRODUCTS:
            return self._is_product(node)
        if target is aten.floor_divide.default and args[0] in self.order:
            divides = type(args[1]) is int and args[1] > 0 and self.num_rows % args[1] == 0
            if divides:
                self.tokens[node] = args[1]  # type: ignore[assignment]
            return divides
        if target in _SUMS and self._is_count(node):
            return True
        return self._is_by_row(node)

    def _move(self, node: fx.Node) -> None:
        self.moved[node] = None

    def _is_count(self, node: fx.Node) -> bool:
        """Numbers of rows by value, and their sums, which no order changes."""
        of: Any = node.args[0]
        counted = node.target is aten.histc.default and of in self.moved
        if counted or of in self.counts:
            self.counts.add(node)
            return True
        return False

    def _ends_groups(self, ends: Any) -> bool:
        """Whether these are the ends of the groups of equal numbers: 0, 1, 2, ..."""
        (num,) = shape(ends)
        summed = _below_casts(ends)
        if summed.target is not aten.cumsum.default or summed.args[1] not in (0, -1):
            return False
        counted = _below_casts(summed.args[0])
        if counted.target is not aten.histc.default or counted.args[1:] != (num, 0, num - 1):
            return False
        values = _below_casts(counted.args[0])
        return values.target is operator.getitem and values.args == (self.sort, 0)

    def _is_product(self, node: fx.Node) -> bool:
        x, other, experts = node.args[:3]
        if x not in self.moved or experts not in self.experts:
            return False
        if node.target is expert_outer:
            return other in self.moved
        self._move(node)
        return not self._is_of_sort(other)  # type: ignore[arg-type]

    def _is_by_row(self, node: fx.Node) -> bool:
        """Ops that treat each row by itself, and sums over all rows."""
        if node.target is aten.sum.dim_IntList and _dims(node, 1) == [0]:
            return node.args[0] in self.moved
        if not isinstance(node.meta.get("val"), Tensor) or shape(node)[:1] != (self.num_rows,):
            return False
        operands = [x for x in node.all_input_nodes if isinstance(x.meta["val"], Tensor)]
        if is_pointwise(node.target):
            known = all(self._is_aligned(x, len(shape(node))) for x in operands)
        else:
            known = all(x in self.moved for x in operands) and _keeps_first_dim(node)
        if known:
            self._move(node)
        return known

    def _is_aligned(self, x: fx.Node, ndim: int) -> bool:
        """Whether an elementwise op of `ndim` dims pairs rows with rows, or all of them with one value."""
        if x in self.moved:
            return len(shape(x)) == ndim
        return not self._is_of_sort(x) and (len(shape(x)) < ndim or shape(x)[0] == 1)

    def _is_lookup(self, node: fx.Node) -> bool:
        base, indices, *rest = node.args
        index = indices[0] if len(indices) == 1 else None  # type: ignore[index, arg-type]
        if index is None or self._is_of_sort(base):  # type: ignore[arg-type]
            return self._is_put_back(node, index)
        if node.target is aten.index.Tensor:
            return self._is_read(node, base, index)
        return self._is_write(node, base, index, *rest)

    def _is_put_back(self, node: fx.Node, index: Any) -> bool:
        """`moved[inverse]`: the rows as they were."""
        if node.target is not aten.index.Tensor or index not in self.inverse:
            return False
        self.new[node] = "operand"
        return node.args[0] in self.moved

    def _is_read(self, node: fx.Node, base: Any, index: Any) -> bool:
        """Rows of a value in its own order, or of a table by the sorted numbers, become sorted rows."""
        rows = shape(base)[0]
        if index in self.order and rows == self.num_rows:
            self.new[node] = "operand"
        elif index in self.tokens and rows * self.tokens[index] == self.num_rows:
            self.new[node] = "repeated"
        elif index not in self.moved:
            return False
        self._move(node)
        return True

    def _is_write(
        self, node: fx.Node, base: Any, index: Any, values: Any, accumulate: Any = False
    ) -> bool:
        """Rows written by the same indices: in their first order, in that of the sort, or added up."""
        rows, zeros = shape(base)[0], base.target is aten.full.default and base.args[1] == 0
        if index in self.inverse and values not in self.moved:
            if self._is_of_sort(values) or rows != self.num_rows or not zeros:
                return False
            self.new[node] = "values"
            self._move(node)
            return True
        if index in self.order and rows == self.num_rows:
            if values in self.moved and zeros:
                self.new[node] = "values"
                return True
            if _counts_up(values, self.num_rows) and not accumulate:
                self.inverse.add(node)
                return True
        if not (values in self.moved and accumulate):
            return False
        if index in self.tokens and zeros and rows * self.tokens[index] == self.num_rows:
            self.new[node] = "summed"
            return True
        return index in self.moved  # a table's gradient

    def write(self) -> None:
        experts: Any = self.given
        for node, how in self.new.items():
            emit = self.editor.at(node)
            base, _, *rest = node.args
            if how == "operand":
                made: Any = base
            elif how == "values":
                made = rest[0]
            elif how == "repeated":
                made = self._repeated(emit, base)
            else:
                made = self._summed(emit, rest[0], shape(node))
            node.replace_all_uses_with(cast_like(emit, made, node))
        values = [n for n in self.sort.users if n.args[1] == 0]
        for node in (*values, *self.experts):
            made = experts
            if node in self.experts and made.meta["val"].dtype != torch.int64:
                made = self.editor.at(node)(aten._to_copy.default, made, dtype=torch.int64)
            node.replace_all_uses_with(made)

    def _repeated(self, emit: Emit, x: Any) -> fx.Node:
        """Each row as often as a token has rows."""
        num, *rest = shape(x)
        each = self.num_rows // num
        apart = shaped(emit, x, [num, 1, *rest])
        return shaped(
            emit, emit(aten.expand.default, apart, [num, each, *rest]), [num * each, *rest]
        )

    def _summed(self, emit: Emit, values: Any, to: tuple[int, ...]) -> fx.Node:
        """The sum of the rows of each token."""
        each = self.num_rows // to[0]
        apart = shaped(emit, values, [to[0], each, *shape(values)[1:]])
        return emit(aten.sum.dim_IntList, apart, [1])


def _dims(node: fx.Node, position: int) -> list[int]:
    """The dims in an argument, counted from the first, of the larger of operand and result."""
    given: Any = node.args[position]
    ndim = max(1, len(shape(node)), len(shape(node.all_input_nodes[0])))
    return [d % ndim for d in (given if isinstance(given, list | tuple) else [given])]


# The position of the dims that an op joins, takes apart or reduces.
_OF_DIMS: dict[Any, int] = {
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.select_backward.default: 2,
    aten.stack.default: 1,
    aten.slice_backward.default: 2,
    aten.cat.default: 1,
    aten._softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
    aten.amax.default: 1,
}


def _keeps_first_dim(node: fx.Node) -> bool:
    if node.target in (aten.reshape.default, aten.expand.default, aten._to_copy.default):
        return all(shape(x)[:1] == shape(node)[:1] for x in node.all_input_nodes)
    if node.target is aten.permute.default:
        return _dims(node, 1)[0] == 0
    position = _OF_DIMS.get(node.target)
    return position is not None and 0 not in _dims(node, position)


def _below_casts(x: Any) -> fx.Node:
    while x.target is aten._to_copy.default:
        x = x.args[0]
    return x


def _is_ascending(sort: fx.Node) -> bool:
    names = (
        ("dim", "descending")
        if sort.target is aten.sort.default
        else ("stable", "dim", "descending")
    )
    given = dict(zip(names, sort.args[1:], strict=False)) | sort.kwargs
    return not given.get("descending", False)


def shape(x: Any) -> tuple[int, ...]:
    """The shape of a node."""
    return tuple(int(n) for n in x.meta["val"].shape)


def _counts_up(x: Any, num: int) -> bool:
    """Whether `x` is 0, 1, 2, ..."""
    return isinstance(x, fx.Node) and x.target is aten.arange.default and x.args == (num,)


def _turn_weights(editor: Editor) -> None:
    """A product with turned weights, as one with the weights themselves."""
    for node in editor.graph.find_nodes(op="call_function", target=expert_mm):
        weight: Any = node.args[1]
        base, is_swapped = peeled(weight)
        if is_swapped:
            node.update_arg(1, cast_like(editor.at(node), base, weight))
            node.update_arg(3, not node.args[3])
    erase_dead(editor.graph)
