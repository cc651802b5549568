"""One small program for each row of the table of passes, written by hand: what golden texts are made of.

No capture is involved, so the texts do not depend on the version of PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from small_programs import Builder
from tutti.graph.edits.edit import value_of
from tutti.graph.ops import collectives, expert_rows
from tutti.graph.ops.fused_updates import KERNELS
from tutti.graph.ops.loop import SEND, Body, Do, LoopPart, Sum, loop
from tutti.layout import Layout
from tutti.passes import pass_table
from tutti.passes.pass_table import Pass, Setting
from tutti.passes.target import Target

aten = torch.ops.aten
HERE = ("data",)
_SGD = next(k for k in KERNELS if k.name == "sgd")
_NUMBERS = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
_SWITCHES = {"nesterov": False, "maximize": False}


@dataclass(frozen=True)
class Small:
    """A graph, and where it stands."""

    graph: fx.Graph
    setting: Setting

    def apply(self, row: Pass) -> None:
        """Let the pass rewrite the graph, or take back what partition has written."""
        if row.taken_back is not None:
            row.take_back(self.graph)
        else:
            row.apply(self.graph, self.setting)


def _setting(
    *updated: str, layout: str = "data=2", near: bool = True, onednn: bool = False
) -> Setting:
    captured = SimpleNamespace(updated=list(updated), mode=FakeTensorMode())
    program: Any = SimpleNamespace(captured=captured, layout=Layout.parse(layout))
    shared = frozenset({HERE}) if near else frozenset[tuple[str, ...]]()
    return Setting(program, Target(frozenset(updated), shared, onednn))


def _in(region: str, node: fx.Node) -> fx.Node:
    node.meta["region"] = region
    return node


def _returned() -> fx.Graph:
    b = Builder()
    w, x = b.given("w", 4, 4), b.given("batch.0", 4, 4, kind="batch")
    loss = b.call(aten.sum.default, x, shape=(1,))
    return b.done([w, loss, loss], [b.call(aten.add.Tensor, w, x)])


def _gathered_twice() -> fx.Graph:
    b = Builder()
    w = b.given("w", 2)
    forward, backward = (b.call(collectives.all_gather, w, HERE, 0, 1, shape=(4,)) for _ in "fb")
    return b.done([b.call(aten.mul.Tensor, forward, backward)], [])


def _scattered(nbytes: int = 16) -> fx.Graph:
    """The sum over ranks of a matmul, of which each rank needs a part."""
    b = Builder()
    n = int((nbytes // 4) ** 0.5)
    x = b.given("batch.0", n, n, kind="batch")
    matmul = b.call(aten.mm.default, x, x)
    part = b.call(collectives.reduce_scatter, matmul, HERE, 0, 1, "sum", shape=(n // 2, n))
    return b.done([b.call(aten.sum.default, part, shape=(1,))], [])


def _two_layers() -> fx.Graph:
    """Two layers and their gradient: what the backward reads of the first may be made again."""
    b = Builder()
    x = b.given("batch.0", 3, 4, kind="batch")
    weights = [b.given("w", 4, 4), b.given("v", 4, 4)]
    made, inputs = [], [x]
    for w in weights:
        made.append(_in("forward", b.call(aten.mm.default, inputs[-1], w, shape=(3, 4))))
        inputs.append(_in("forward", b.call(aten.gelu.default, made[-1])))
    gradient = _in("backward", b.call(aten.mul.Tensor, inputs[-1], 2.0))
    found = []
    for w, matmul, given in zip(weights[::-1], made[::-1], inputs[-2::-1], strict=True):
        gradient = _in("backward", b.call(aten.gelu_backward.default, gradient, matmul))
        turned = _in("backward", b.call(aten.permute.default, given, [1, 0], shape=(4, 3)))
        found.append(_in("backward", b.call(aten.mm.default, turned, gradient, shape=(4, 4))))
        if w is not weights[0]:
            gradient = _in("backward", b.call(aten.mm.default, gradient, w, shape=(3, 4)))
    return b.done(found[::-1], [])


def _batched() -> fx.Graph:
    b = Builder()
    x, w, v = b.given("x", 6, 4, kind="batch"), b.given("w", 4, 5), b.given("v", 5, 4)
    up = b.call(aten.mm.default, x, w, shape=(6, 5))
    whole = b.call(aten.reshape.default, up, [2, 3, 5], shape=(2, 3, 5))
    acted = b.call(aten.gelu.default, whole)
    again = b.call(aten.reshape.default, acted, [6, 5], shape=(6, 5))
    return b.done([b.call(aten.mm.default, again, v, shape=(6, 4))], [])


def _by_one() -> fx.Graph:
    b = Builder()
    x = b.given("x", 3, kind="batch")
    power = b.call(aten.pow.Tensor_Scalar, x, 1.0)
    return b.done([b.call(aten.mul.Tensor, power, 2.0)], [])


def _twice() -> fx.Graph:
    b = Builder()
    x = b.given("x", 3, kind="batch")
    both = [b.call(aten.mul.Tensor, x, 2.0) for _ in range(2)]
    return b.done([b.call(aten.sub.Tensor, *both)], [])


def _counts() -> fx.Graph:
    b = Builder()
    counts = [b.given(name, kind="slot") for name in ("a", "b")]
    return b.done([], [_in("update", b.call(aten.add.Tensor, c, 1.0)) for c in counts])


def _reductions() -> fx.Graph:
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    first = b.call(aten.mul.Tensor, x, 2.0)
    one = b.call(collectives.reduce_scatter, first, HERE, 0, 1, "sum", shape=(2, 4))
    second = b.call(aten.add.Tensor, first, 1.0)
    two = b.call(collectives.reduce_scatter, second, HERE, 0, 1, "sum", shape=(2, 4))
    return b.done([], [b.call(aten.add.Tensor, one, two)])


def _backward() -> fx.Graph:
    b = Builder()
    w, v = b.given("w", 4), b.given("v", 4)
    grad_v = _in("backward", b.call(aten.mul.Tensor, v, 2.0))
    grad_w = _in("backward", b.call(aten.mul.Tensor, w, 5.0))
    new_w = _in("update", b.call(aten.sub.Tensor, w, grad_w))
    return b.done([], [new_w, _in("update", b.call(aten.sub.Tensor, v, grad_v))])


def _updates() -> fx.Graph:
    b = Builder()
    new = []
    for weight, gradient in ("wg", "vh"):
        p, g = b.given(weight, 4), b.given(gradient, 4)
        made = b.call(_SGD.op, [p], [g], [], shape=(4,))
        made.kwargs, made.meta["val"] = {**_NUMBERS, **_SWITCHES}, [p.meta["val"]]
        new.append(b.call(operator.getitem, made, 0, shape=(4,)))
    return b.done([], new)


def _updated_in_parts() -> fx.Graph:
    b = Builder()
    w, g = b.given("w", 4, 4), b.given("g", 2, 4, kind="batch")
    mine = b.call(collectives.shard, w, HERE, 0, 1, shape=(2, 4))
    new = b.call(aten.add.Tensor, mine, g)
    return b.done([], [b.call(collectives.all_gather, new, HERE, 0, 1, shape=(4, 4))])


def _looked_at() -> fx.Graph:
    """A gathered weight, as `shared_state` leaves it: read, returned, and its part updated."""
    b = Builder()
    w = b.given("w", 2, 4)
    several = b.call(collectives.together_, "all_gather", [w], HERE, [(0, 1)], "", shape=(4, 4))
    several.meta["val"] = [torch.empty(4, 4)]
    whole = b.call(operator.getitem, several, 0, shape=(4, 4))
    loss = b.call(aten.sum.default, whole, shape=(1,))
    return b.done([loss, whole], [b.call(aten.mul_.Tensor, w, 0.9)])


def _copied_into_a_slot() -> fx.Graph:
    """A slot with the weight before its last change, in the weight's memory, as `in_place` leaves it."""
    b = Builder()
    w = b.given("w", 2, 4)
    several = b.call(collectives.together_, "all_gather", [w], HERE, [(0, 1)], "", shape=(4, 4))
    several.meta["val"] = [torch.empty(4, 4)]
    loss = b.call(aten.sum.default, b.call(operator.getitem, several, 0, shape=(4, 4)), shape=(1,))
    slow = b.call(aten.mul_.Tensor, w, 0.9)
    return b.done([loss], [slow, b.call(aten.mul.Tensor, slow, 0.5)])


def _in_buffers() -> fx.Graph:
    """A sum over ranks in shared memory, as `shared_buffers` leaves it."""
    graph = _scattered(2**16)
    _row("shared_buffers").apply(graph, _setting())
    return graph


def _given_out() -> fx.Graph:
    """Three buffers, of which the first two live at once; the program gives out what lies in the third."""
    b = Builder()
    x, filled = b.given("batch.0", 4, 4, kind="batch"), []
    for factor in (2.0, 3.0, 4.0):
        memory = b.call(collectives.buffer, HERE, 0, [4, 4], torch.float32, shape=(4, 4))
        filled.append(b.call(aten.mul.out, x, factor, shape=(4, 4)))
        filled[-1].kwargs = {"out": memory}
        if len(filled) == 2:
            matmul = b.call(aten.mm.default, *filled)
    return b.done([matmul, filled[-1]], [])


def _late() -> fx.Graph:
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    gradient = b.call(aten.mul.Tensor, x, 2.0)
    total = b.call(collectives.all_reduce, gradient, HERE, "sum")
    y = b.call(aten.sin.default, gradient)
    for _ in range(3):
        y = b.call(aten.mul.Tensor, y, 3.0)
    return b.done([], [b.call(aten.add.Tensor, total, y)])


def _decayed() -> fx.Graph:
    b = Builder()
    w, g = b.given("w", 4), b.given("g", 4, kind="batch")
    return b.done([], [b.call(aten.add.Tensor, b.call(aten.mul.Tensor, w, 0.99), g)])


def _layer() -> fx.Graph:
    b = Builder()
    x, w, c = b.given("x", 2, 3, 4, kind="batch"), b.given("w", 5, 4), b.given("b", 5)
    flat = b.call(aten.reshape.default, x, [6, 4], shape=(6, 4))
    turned = b.call(aten.permute.default, w, [1, 0], shape=(4, 5))
    matmul = b.call(aten.addmm.default, c, flat, turned, shape=(6, 5))
    return b.done([b.call(aten.reshape.default, matmul, [2, 3, 5], shape=(2, 3, 5))], [])


def _large() -> fx.Graph:
    b = Builder()
    x, y = b.given("x", 256, 256, kind="batch"), b.given("y", 256, 512, kind="batch")
    return b.done([b.call(aten.mm.default, x, y, shape=(256, 512))], [])


def _part_given_away() -> fx.Graph:
    b = Builder()
    mine = b.call(collectives.part, b.given("w", 4, 4), HERE, 0, 1, shape=(2, 4))
    return b.done([b.call(collectives.all_gather, mine, HERE, 0, 1, shape=(4, 4))], [])


def _with_loop(body: Body, *shape: int) -> fx.Graph:
    b = Builder()
    given = [b.given(name, *shape, kind="batch") for name in body.given]
    node = b.call(loop, body, given, shape=shape)
    node.meta["val"] = [torch.empty(shape) for _ in body.results]
    results = [b.call(operator.getitem, node, i, shape=shape) for i in range(len(body.results))]
    return b.done(results, [])


def _sent() -> fx.Graph:
    """A part that makes `a`, which another place reads, and then something from it."""
    b = Builder()
    x = b.given("x", 512, 512, kind="batch")
    a = b.call(aten.tanh.default, x)
    parts = {(0, "F"): LoopPart(b.done([a, b.call(aten.mm.default, a, a)], []), ("x",), ("a", "b"))}
    row = (Do("F", 0, 0), Do("F", 0, 0, SEND, 1))
    body = Body(1, parts, row, ("x",), (), (), {(0, "F", 1): ("a", "b")})
    return _with_loop(body, 512, 512)


def _summed(n: int = 4) -> fx.Graph:
    """A part that makes a gradient for each of two micro-batches."""
    b = Builder()
    g, x = b.given("g", n, n, kind="batch"), b.given("x", n, n, kind="batch")
    graph: Any = b.done([], [_in("backward", b.call(aten.mm.default, g, x))])
    parts = {(0, "B"): LoopPart(graph, ("g", "x"), (), ("w",))}
    row = tuple(Do("B", 0, k) for k in range(2))
    return _with_loop(Body(2, parts, row, ("g", "x"), (Sum("w", "sum"),), ("w",)), n, n)


def _summed_over_ranks() -> fx.Graph:
    """The sum of the gradients of two micro-batches, of which each rank updates a part."""
    graph = _summed(256)
    (item,) = (n for n in graph.nodes if n.target is operator.getitem)
    with graph.inserting_after(item):
        part = graph.call_function(collectives.reduce_scatter, (item, HERE, 0, 1, "sum"))
    part.meta = {"val": torch.empty(128, 256)}
    item.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)
    return graph


def _of_two_stages() -> fx.Graph:
    """The backwards of two stages of a rank, whose last ones have a reduction each."""
    parts, last = {}, {}
    for stage in (2, 0):
        b = Builder()
        plain: Any = b.done([], [b.call(aten.neg.default, b.given("g", 4, 4, kind="batch"))])
        parts[stage, "B"] = LoopPart(plain, ("g",), (), (f"w{stage}",))
        b = Builder()
        g, before = b.given("g", 4, 4, kind="batch"), b.given(f"total_w{stage}", 4, 4)
        total = b.call(aten.add_.Tensor, before, b.call(aten.neg.default, g))
        args: Any = ("reduce_scatter", [total], HERE, [[0, 1]], "sum")
        made = b.graph.call_function(collectives.together, args)
        made.meta = {"val": [torch.empty(2, 4)]}
        done: Any = b.done([b.call(operator.getitem, made, 0, shape=(2, 4))], [])
        names = {"totals": (f"w{stage}",), "reduced": (f"reduced_w{stage}",)}
        last[stage, "B"] = LoopPart(done, ("g",), (), **names)
    row = Do("B", 2, 0), Do("B", 2, 1), Do("B", 0, 0), Do("B", 0, 1)
    sums = tuple(Sum(f"w{stage}", "sum") for stage in (2, 0))
    return _with_loop(
        Body(2, parts, row, ("g",), sums, ("reduced_w2", "reduced_w0"), last=last), 2, 4
    )


def attention() -> fx.Graph:
    """The backward of a GPU's attention, with a result that the forward here has not made."""
    graph, mode = fx.Graph(), FakeTensorMode()
    names = ("grad", "q", "k", "v", "out", "lse", "seed", "offset")
    with mode:
        like = torch.empty(2, 3, 32, 8, dtype=torch.float16, device="cuda")
        row = torch.empty(2, 3, 32, device="cuda")
        one = torch.empty((), dtype=torch.int64)
    given = [graph.placeholder(name) for name in names]
    for x, val in zip(given, (*[like] * 5, row, one, one), strict=True):
        x.meta |= {"val": val, "kind": "batch", "name": x.name}
    grad, q, k, v, out, lse, seed, offset = given
    args = (grad, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False])
    both = graph.call_function(aten._scaled_dot_product_efficient_attention_backward.default, args)
    both.meta["val"] = (like, like, like, None)
    first = graph.call_function(operator.getitem, (both, 0))
    first.meta["val"] = like
    graph.output(([first], []))
    return graph


def experts() -> fx.Graph:
    """Rows go to the experts of two ranks and back: 4 rows here, so 8 slots come."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def given(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta = {"val": torch.empty(shape, dtype=dtype), "name": name, "kind": "batch"}
        return node

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta = {"val": target(*value_of(args))}
        return node

    def move(slots: fx.Node, *dims: int) -> fx.Node:
        """The two leading dims change places: one of them is split over the ranks."""
        node = graph.call_function(collectives.all_to_all, (slots, HERE, *dims))
        val = slots.meta["val"]
        with mode:
            shape = (val.shape[1], val.shape[0], *val.shape[2:])
            node.meta = {"val": torch.empty(shape, dtype=val.dtype)}
        return node

    x, kinds = given("x", 4, 3), given("kinds", 4, dtype=torch.int64)
    weight, num = given("weight", 1, 3, 3), given("num", dtype=torch.int64)
    own = call(expert_rows.expert_slots, kinds, 2, 2, 4)
    came = move(call(expert_rows.cut_slots, own, num, 2), 0, 1, 1, 1)
    of_slots = call(aten.reshape.default, call(expert_rows.fill_slots, came, 4, -1), [8])
    slots = call(expert_rows.to_experts, x, kinds, 2, 2, 4)
    came = move(call(expert_rows.cut_slots, slots, num, 2), 0, 1, 1, 1)
    flat = call(aten.reshape.default, call(expert_rows.fill_slots, came, 4, 0), [8, 3])
    made = call(aten.silu.default, call(expert_rows.expert_mm, flat, weight, of_slots, False, 1, 2))
    apart = call(aten.reshape.default, made, [1, 2, 4, 3])
    went = move(call(expert_rows.cut_slots, apart, num, 2), 1, 1, 0, 1)
    back = call(expert_rows.fill_slots, went, 4, 0)
    graph.output(([call(expert_rows.from_experts, back, kinds, 2, 2)], []))
    return graph


def _row(name: str) -> Pass:
    return next(row for row in pass_table.PASSES if row.name == name)


# By the name of its pass how a program is made, and where it stands.
PROGRAMS: dict[str, tuple[Callable[[], fx.Graph], Callable[[], Setting]]] = {
    "own_results": (_returned, lambda: _setting("w")),
    "reduce_scatter": (_scattered, _setting),
    "regather": (_gathered_twice, _setting),
    "filled_slots": (experts, _setting),
    "remat": (_two_layers, lambda: _setting(layout="remat=full")),
    "rows": (_batched, _setting),
    "simplify": (_by_one, _setting),
    "common": (_twice, _setting),
    "early_reductions": (_summed_over_ranks, lambda: _setting(near=False)),
    "foreach": (_counts, lambda: _setting("a", "b")),
    "bucket": (_reductions, _setting),
    "early_update": (_backward, lambda: _setting("w", "v")),
    "fused_update": (_updates, lambda: _setting("w", "v")),
    "shared_state": (_updated_in_parts, lambda: _setting("w")),
    "own_views": (_looked_at, lambda: _setting("w")),
    "shared_buffers": (lambda: _scattered(2**16), _setting),
    "in_buffer": (_in_buffers, _setting),
    "overlap": (_late, lambda: _setting(near=False)),
    "late_ends": (_of_two_stages, _setting),
    "in_place": (_decayed, lambda: _setting("w")),
    "linear": (_layer, _setting),
    "onednn": (_large, lambda: _setting(onednn=True)),
    "attention_memory": (attention, _setting),
    "early_sends": (_sent, _setting),
    "accumulate": (_summed, _setting),
    "copy_parts_given_away": (_part_given_away, lambda: _setting("w")),
    "apart_from_state": (_copied_into_a_slot, lambda: _setting("slow", "w")),
    "wait_for_readers": (_looked_at, lambda: _setting("w")),
    "leave_buffers": (_given_out, _setting),
    "place_buffers": (_given_out, _setting),
}


def small(name: str) -> Small:
    """A fresh program for the pass `name`."""
    graph, setting = PROGRAMS[name]
    return Small(graph(), setting())
