"""Memory that stays is looked at once, when the code is written."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from small_programs import Builder
from tutti.execution.fixed import Fixed
from tutti.execution.generate import generate
from tutti.graph.ops import collectives
from tutti.graph.players.dim_segments import split
from tutti.graph.players.move import Move
from tutti.layout import Mesh
from tutti.server.split.small_sums import SmallSums

aten = torch.ops.aten
HERE = ("data",)


class Memory:
    """The first of two ranks; the other one's values are zeros."""

    def __init__(self) -> None:
        self.arena, self.claims = torch.zeros(64), 0

    def buffer(self, axes: Any, offset: int, shape: Any, dtype: torch.dtype) -> Tensor:
        numel = torch.Size(shape).numel()
        return self.arena[offset // 4 : offset // 4 + numel].view(*shape)

    def claimed(self, x: Tensor, axes: Any) -> Tensor:
        self.claims += 1
        return x

    def whole(self, x: Tensor, axes: Any) -> Tensor | None:
        return None

    def part(self, x: Tensor, axes: Any, dim: int, outer: int) -> Tensor:
        return split(x, dim, outer, 2)[0]

    def play(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        assert move.kind == "reduce_part"
        return list(xs)

    def gather_into(self, move: Move, names: Sequence[str], xs: Sequence[Tensor]) -> list[Tensor]:
        raise AssertionError

    def meet(self, axes: Any) -> None:
        raise AssertionError


class Player(SmallSums):
    """Has such memory; nothing else of it is played."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(lambda name, values: values, 0, 2)
        self._memory = memory

    @property
    def shared_memory(self) -> Memory:
        return self._memory


def _program() -> fx.Graph:
    """Two matmuls in buffers, reduced together; their parts and a weight's part, and a copy of one."""
    b = Builder()
    x, w = b.given("x", 4, 4, kind="batch"), b.given("w", 4, 4)
    made = []
    for i in range(2):
        memory = b.call(collectives.buffer, HERE, 64 * i, [4, 4], torch.float32, shape=(4, 4))
        matmul = b.call(aten.mm.out, x, x, shape=(4, 4))
        matmul.kwargs = {"out": memory}
        made.append(matmul)
    sums = b.call(collectives.together_, "reduce_part", made, HERE, [(0, 1)] * 2, "sum", shape=(1,))
    items = [b.call(getitem, sums, i, shape=(4, 4)) for i in range(2)]
    parts = [b.call(collectives.part, i, HERE, 0, 1, shape=(2, 4)) for i in items]
    own = b.call(collectives.part, w, HERE, 0, 1, shape=(2, 4))
    turned = b.call(aten.permute.default, own, [1, 0], shape=(4, 2))
    copied = b.call(aten.reshape.default, turned, [8], shape=(8,))
    return b.done([b.call(aten.add.Tensor, *parts), b.call(aten.sum.default, copied)], [])


def test_views_of_what_stays_are_constants() -> None:
    memory = Memory()
    w = torch.randn(4, 4)
    made = generate(
        _program(),
        nn.Module(),
        Player(memory),
        Mesh((("data", 2),)),
        {"data": 0},
        lodged={"w": w},
    )
    assert (
        made.text.count("= ") == 1 + 2 + 2 + 1 + 3
    )  # inputs, claim and memory, matmuls, sums, the rest
    x = torch.randn(4, 4)
    for step in range(2):
        total, ones = made.function([x, w], lambda stream: 0)[0]
        torch.testing.assert_close(total, 2 * (x @ x)[:2])
        torch.testing.assert_close(ones, w[:2].sum())
        assert (
            memory.claims == step + 1
        )  # the second buffer is asked for before anybody can read it
        w.add_(1.0)  # in place, as a step does


def test_what_may_be_replaced_is_looked_at_again() -> None:
    graph, w = _program(), torch.randn(4, 4)
    fixed = Fixed(Memory(), {})
    own = next(n for n in graph.nodes if n.target is aten.permute.default).args[0]
    assert fixed.of(own) is None
    assert Fixed(Memory(), {"w": w}).of(own) is not None


def test_a_copy_is_no_look() -> None:
    fixed = Fixed(Memory(), {"w": torch.randn(4, 4)})
    copied = next(n for n in _program().nodes if n.target is aten.reshape.default)
    assert fixed.of(copied) is None and not fixed.is_look(copied)
    assert fixed.is_look(copied.args[0])  # type: ignore[arg-type]


def test_a_long_chain_of_writes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(3_000):
        x = graph.call_function(aten.mul_.Scalar, (x, 0.5))
    assert Fixed(Memory(), {}).of(x) is None
