"""Values that a step leaves in Python: for its next call, or only for inspection.

A module keeps its attention weights, a trainer the last output. Such a value is a result of the graph only
if the next call reads it. A second trace, which starts with the values that the first one has left, decides
it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.capture.python.contents import refused_change
from tutti.capture.python.held_values import ITEM, MEMBER, WHOLE, Table, TableEntry
from tutti.capture.python.inputs import fake
from tutti.errors import CaptureError
from tutti.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from tutti.torch_private.module_tables import buffers_of, children_of, parameters_of
from tutti.torch_private.op_tables import OpOverload, schema_of
from tutti.torch_private.pytrees import tree_leaves, tree_map_only
from tutti.torch_private.storages import memory_id
from tutti.torch_private.tracing import get_proxy_mode, get_proxy_slot
from tutti.user_lines import quoted

aten = torch.ops.aten
_DEPTH = 3  # of objects in objects, in the search for tensors
_SYMBOL = re.compile(r"\b(?!b?float|u?int|complex|cuda)[a-z]+\d+\b")  # no dtype, no device


@dataclass(frozen=True)
class LeftValue:
    """A value of the current trace, and the place where the step has left it."""

    entry: TableEntry
    value: Any

    def apart_from(self, inputs: Sequence[Any], mode: FakeTensorMode) -> LeftValue:
        """The same with other fakes in place of `inputs`: the next trace has these, too."""
        own = {id(x) for x in inputs if isinstance(x, Tensor)}
        other = tree_map_only(Tensor, lambda x: fake(x, mode) if id(x) in own else x, self.value)
        return replace(self, value=other)

    def put(self) -> None:
        """Put the value there again."""
        held, key = self.entry.table.find(), self.entry.key
        of_items = self.entry.table.kind == ITEM and isinstance(held, list | deque)
        if of_items and key is not WHOLE and key >= len(held):
            held.append(self.value)
        else:
            self.entry.put(self.value)

    def is_read(self, traced: fx.GraphModule) -> bool:
        """Whether a later trace reads a tensor of it."""
        read = {memory_id(x) for x in _constants(traced)}
        return any(memory_id(x) in read for x in tensors_in(self.value))

    def has_any(self, tensors: Sequence[Any]) -> bool:
        """Whether one of these tensors is in the value."""
        known = {id(x) for x in tensors}
        return any(id(x) in known for x in tensors_in(self.value))

    @property
    def has_numbers_alone(self) -> bool:
        """Whether each tensor of it has one element."""
        sizes = (n for x in tensors_in(self.value) for n in x.shape)
        return all(isinstance(n, int) and n == 1 for n in sizes)  # no symbol, which may be 1 now

    @property
    def has_tensors(self) -> bool:
        """Whether it is or holds a tensor."""
        return any(True for _ in tensors_in(self.value))

    @property
    def is_function(self) -> bool:
        """Whether it is a function written in Python."""
        return isinstance(self.value, FunctionType)

    @property
    def is_item(self) -> bool:
        """Whether it is in a list or a deque."""
        return self.entry.table.kind == ITEM and isinstance(self.entry.table.find(), list | deque)

    def refused_alias(self) -> CaptureError:
        """The error for state of the step that the next call reads at this place."""
        return CaptureError(
            f"the step keeps a parameter or a buffer in {self.entry.name} from one call to the next",
            why="each call returns values, and the next one would read a copy",
            fix="read it through the model in each call; or keep x.detach().clone()",
        )

    def refused_item(self) -> CaptureError:
        """The error for an item of a longer list, where the trace of the next call has another one."""
        return CaptureError(
            f"the next call appends other values than this one to {self.entry.table.prefix}",
            why="it reads the list, or a clock; the step is captured once: its Python would not run again",
            fix="append it outside of the step",
        )

    def refused(self) -> CaptureError:
        """The error for a value that the next call reads, and that calls cannot leave again."""
        name, kind = self.entry.name, type(self.value).__name__
        if isinstance(self.value, Tensor):
            buffer = f'self.register_buffer("{name.rpartition(".")[2]}", its first value)'
            of_list = "a list of as many items before as after: it may replace and move them"
            return CaptureError(
                f'the step keeps a tensor in "{name}" from one call to the next',
                why="the step is captured once: it would read the value of that call for ever",
                fix=of_list if self.entry.table.kind == ITEM else buffer,
            )
        line = ""
        if isinstance(self.value, FunctionType):
            code = self.value.__code__
            line = quoted(f"{code.co_filename}:{code.co_firstlineno}")
        return CaptureError(
            f"the step puts a {kind} into {name}, and its next call depends on it",
            at=line,
            why="the step is captured once: its Python would not run again",
            fix="numbers, strings, tensors, or tuples, lists and dicts of them",
        )


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in a value: in tuples, lists and dicts, and in the attributes of objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, nn.Module | type) and hasattr(leaf, "__dict__"):
            for inner in vars(leaf).values():
                yield from tensors_in(inner, depth - 1)


class ModuleTables:
    """The buffers and the modules in a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers: list[tuple[Table, dict[str, Any]]] = []
        # Children and parameters.
        self._held: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        for path, module in model.named_modules():
            prefix, buffers = f"{path}." if path else "", buffers_of(module)
            table = Table(prefix, MEMBER, lambda held=buffers: held, None)
            self._buffers.append((table, dict(buffers)))
            for held in (children_of(module), parameters_of(module)):
                self._held.append((prefix, held, dict(held)))

    def left(self, stand_ins: Mapping[int, Tensor]) -> list[LeftValue]:
        """The values of the current trace in buffers that were None before.

        `stand_ins` are its fakes of the tensors that were there before.
        """
        found: list[LeftValue] = []
        fakes = {id(x) for x in stand_ins.values()}
        for table, before in self._buffers:
            for key, value in table.find().items():
                old = before.get(key)
                if not isinstance(value, FakeTensor) or id(value) in fakes:
                    continue
                if value is not old and not isinstance(old, Tensor) and varies(value, old):
                    found.append(LeftValue(TableEntry(table, key), value))
        return found

    def refuse_others(self) -> None:
        """Raise `CaptureError` if the step has added, removed or replaced modules, or added parameters."""
        for prefix, now, before in self._held:
            for key in {**before, **now}:
                old, new = before.get(key), now.get(key)
                if new is old or (isinstance(new, FakeTensor) and isinstance(old, Tensor)):
                    continue
                what = "module" if isinstance(old or new, nn.Module) else "parameter"
                raise CaptureError(
                    f'the step puts another {what} into "{prefix}{key}"',
                    why="the step is captured once: its Python would not run again",
                    fix="do it between two steps; choose among several by a number or a string",
                )

    def put_back(self) -> None:
        """Restore everything."""
        for table, before in self._buffers:
            now = table.find()
            for key in [k for k, value in now.items() if isinstance(value, FakeTensor)]:
                del now[key]
                now.update({key: before[key]} if key in before else {})
        for _, held, known in self._held:
            if [*map(id, held.values())] != [*map(id, known.values())]:
                held.clear()
                held.update(known)


@dataclass(frozen=True)
class LeftTrace:
    """A trace, and the leaves of its results: the returned ones, then by name those of each effect.

    `resized` has the lists in modules with another length at its end: name, length before and after;
    `rewritten` the other ones.
    `forms` are those of all results, with their constants.
    """

    traced: fx.GraphModule
    num_returned: int
    effects: tuple[tuple[str, int], ...]
    resized: tuple[tuple[str, int, int], ...] = ()
    forms: Any = None
    rewritten: tuple[tuple[str, int, int], ...] = ()

    def results(self) -> dict[str, list[Any]]:
        """By name, the leaves; of returned values by ""."""
        output: Any = self.traced.graph.output_node().args[0]
        found, at = {"": list(output[: self.num_returned])}, self.num_returned
        for name, count in self.effects:
            found[name] = list(output[at : at + count])
            at += count
        return found


def refuse_kept(left: Sequence[LeftValue], later: LeftTrace) -> None:
    """Raise `CaptureError` for a tensor that a later trace reads."""
    for one in left:
        if one.is_read(later.traced):
            raise one.refused()


def refuse_lost(
    left: Sequence[LeftValue], first: LeftTrace, later: LeftTrace, lines: Mapping[str, str]
) -> None:
    """Raise `CaptureError` if a trace that starts with the values `left` computes other results.

    Also for a list that grows at each call: a list that each call fills anew has one length. `lines` has the
    lines of uses of such lists.
    """
    refuse_kept(left, later)
    for one in later.resized:
        raise refused_change(*one, at=lines.get(one[0], ""))
    if not are_alike(first, later):
        raise left[0].refused_item() if left[0].is_item else left[0].refused()


def have_same_results(one: LeftTrace, other: LeftTrace) -> bool:
    """Whether two traces compute the same, under the same names and in the same forms."""
    same = (one.effects, one.resized, one.forms) == (other.effects, other.resized, other.forms)
    return same and are_alike(one, other)


def are_alike(one: LeftTrace, other: LeftTrace) -> bool:
    """Whether two traces compute the same of what both compute, and write the same."""
    a, b = one.results(), other.results()
    common = [name for name in a if name in b]
    first, second = (
        _computed(x.traced, [of[name] for name in common]) for x, of in ((one, a), (other, b))
    )
    if first[0] != second[0] or len(first[1]) != len(second[1]):
        return False
    return all(_are_equal(x, y) for x, y in zip(first[1], second[1], strict=True))


def _computed(traced: fx.GraphModule, results: list[Any]) -> tuple[list[str], list[Any]]:
    """The nodes behind some results and writes, each as a text, and the constants that they read.

    Autograd copies a gradient, or makes a view of it, where any other reference to it exists, such as that of
    a thread which samples stacks. So such copies and views count as their operand.
    """
    needed: set[fx.Node] = set()
    fx.map_arg(results, needed.add)
    for node in reversed(traced.graph.nodes):
        same = _same_as(node)
        if same is not None:
            needed.update({same} if node in needed else ())
        elif node in needed or (node.op == "call_function" and _writes(node.target)):
            needed.update({node, *node.all_input_nodes})
    symbols: dict[str, str] = {}
    names: dict[fx.Node, str] = {}
    texts, constants = list[str](), list[Any]()

    def text(value: Any) -> str:
        plain = str(fx.map_arg(value, lambda n: f"<{names[n]}>"))
        return _SYMBOL.sub(lambda m: symbols.setdefault(m[0], f"symbol {len(symbols)}"), plain)

    for node in traced.graph.nodes:
        if node not in needed or node.op == "output":
            continue
        same = _same_as(node)
        names[node] = names[same] if same is not None else str(len(texts))
        if same is not None:
            continue
        if node.op == "get_attr":
            constants.append(getattr(traced, str(node.target)))
        target = "" if node.op == "get_attr" else str(node.target)
        texts.append(f"{node.op} {target} {text((node.args, node.kwargs))}")
    return [*texts, text(results)], constants


def _same_as(node: fx.Node) -> fx.Node | None:
    """The operand of a view or of a gradient's copy, which autograd makes or not."""
    if node.target is aten.detach.default:
        return node.all_input_nodes[0]
    if node.target is not aten.copy_.default:
        return None
    made: Any = node.args[0]
    own = made.target is aten.new_empty_strided.default and len(made.users) == 1
    return node.all_input_nodes[1] if own else None


def _writes(target: Any) -> bool:
    return isinstance(target, OpOverload) and schema_of(target).is_mutable


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
            return (a.shape, a.dtype) == (b.shape, b.dtype)
        return torch.equal(a, b) if (a.shape, a.dtype) == (b.shape, b.dtype) else False
    return type(a) is type(b)


def _constants(traced: fx.GraphModule) -> list[Tensor]:
    """The constant tensors that a trace reads."""
    nodes = [n for n in traced.graph.nodes if n.op == "get_attr" and n.users]
    found = [getattr(traced, str(n.target)) for n in nodes]
    return [x for x in found if isinstance(x, Tensor)]


def varies(value: Any, before: Any) -> bool:
    """Whether a tensor in a value of the current trace differs between calls."""
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    for x in tensors_in(value):
        slot: Any = get_proxy_slot(x, tracer, None)
        if slot is not None and _varies(slot.proxy.node, tracer.root, before):
            return True
    return False


def computed_from(value: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether a tensor of the current trace depends on the values of one of `others`; a copy of it in another
    dtype, on another device or with another history does not count."""
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    slot, *slots = [get_proxy_slot(x, tracer, None) for x in (value, *others)]
    own = {one.proxy.node for one in slots if one is not None}
    if slot is None or not own:
        return False
    seen: set[tuple[fx.Node, bool]] = set()
    todo = [(slot.proxy.node, False)]
    while todo:
        x, changed = todo.pop()
        if (x, changed) in seen:
            continue
        seen.add((x, changed))
        if x in own and changed:
            return True
        name = str(x.target)
        if not name.startswith(_OF_FORM):
            todo += [(y, changed or not name.startswith(_SAME)) for y in x.all_input_nodes]
    return False


def _varies(node: fx.Node, root: nn.Module, before: Any) -> bool:
    """Whether a node depends on an input of the graph, is random, or changes `before`."""
    own = memory_id(before) if isinstance(before, Tensor) else None
    seen: set[tuple[fx.Node, bool]] = set()
    todo = [(node, False)]
    while todo:
        x, changed = todo.pop()
        if (x, changed) in seen:
            continue
        seen.add((x, changed))
        if x.op == "placeholder" or torch.Tag.nondeterministic_seeded in getattr(
            x.target, "tags", ()
        ):
            return True
        if x.op == "get_attr" and changed and memory_id(getattr(root, str(x.target))) == own:
            return True
        name = str(x.target)
        if not name.startswith(_OF_FORM):
            todo += [(y, changed or not name.startswith(_SAME)) for y in x.all_input_nodes]
    return False


# Ops that read the form of an operand, not its values; and ops that change no value.
_OF_FORM = tuple(
    f"aten.{form}."
    for kind in ("zeros", "ones", "full", "empty")
    for form in (f"{kind}_like", f"new_{kind}")
)
_SAME = ("aten._to_copy.", "aten.detach.", "aten.clone.", "aten.alias.", "aten.lift_fresh")
