"""`onednn`: before and after as text; which matmuls are rewritten; whole steps with and without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import tutti
from pass_rows import replace_row
from ranks import Ranks
from small_programs import Builder, lines
from small_steps import same_step, squares, step
from tutti.comm.collectives import groups as module
from tutti.comm.collectives.groups import Groups
from tutti.execution import execute
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.passes.onednn import onednn
from tutti.passes.pass_table import Setting
from tutti.passes.target import Target
from tutti.pipeline import targets

aten = torch.ops.aten
HERE = Target(onednn=True)


def matmuls() -> fx.Graph:
    """A matmul in every form, 256 x 256 by 256 x 512."""
    b = Builder()
    x, w, c = b.given("x", 256, 256, kind="batch"), b.given("w", 512, 256), b.given("c", 512)
    y, out = b.given("y", 256, 512), b.given("out", 256, 512)
    turned = b.call(aten.permute.default, w, [1, 0], shape=(256, 512))
    made = [
        b.call(aten.mm.default, x, y, shape=(256, 512)),
        b.call(aten.mm.default, x, turned, shape=(256, 512)),
        b.call(aten.addmm.default, c, x, y, shape=(256, 512)),
        b.call(aten.linear.default, x, w, c, shape=(256, 512)),
        b.call(aten.mm.out, x, y, shape=(256, 512)),
    ]
    made[-1].kwargs = {"out": out}
    return b.done(made, [])


def gradient(m: int, k: int, n: int, *, out: bool = False) -> fx.Graph:
    """The transpose of `g` (m, k), by `x` (m, n): how the gradient of a weight is made."""
    b = Builder()
    g, x = b.given("g", m, k, kind="batch"), b.given("x", m, n, kind="batch")
    memory = b.given("out", k, n)
    turned = b.call(aten.permute.default, g, [1, 0])
    turned.meta["val"] = g.meta["val"].permute(1, 0)
    made = b.call(aten.mm.out if out else aten.mm.default, turned, x, shape=(k, n))
    if out:
        made.kwargs = {"out": memory}
    return b.done([made], [])


def test_before_and_after() -> None:
    graph = matmuls()
    before = lines(graph)
    assert before == [
        "permute(%w, [1, 0])",
        "mm(%x, %y)",
        "mm(%x, %5)",
        "addmm(%c, %x, %y)",
        "linear(%x, %w, %c)",
        "mm.out(%x, %y, out=%out)",
    ]
    assert onednn(graph, Target()) == 0 and lines(graph) == before
    assert onednn(graph, HERE) == 5
    graph.lint()
    assert lines(graph) == [
        "permute(%y, [1, 0])",
        "onednn_matmul(%x, %5)",
        "onednn_matmul(%x, %w)",
        "onednn_matmul(%x, %5, %c)",
        "onednn_matmul(%x, %w, %c)",
        "onednn_matmul(%x, %5)",
        "copy_(%out, %10)",
    ]


def test_no_transpose_is_left_over() -> None:
    """Two of one weight, of which neither is read any more."""
    b = Builder()
    x, w = b.given("x", 256, 256, kind="batch"), b.given("w", 512, 256)
    turned = [b.call(aten.permute.default, w, [1, 0], shape=(256, 512)) for _ in range(2)]
    graph = b.done([b.call(aten.mm.default, x, t, shape=(256, 512)) for t in turned], [])
    assert onednn(graph, HERE) == 2
    assert lines(graph) == ["onednn_matmul(%x, %w)", "onednn_matmul(%x, %w)"]


def test_the_smaller_operand_is_laid_out_anew() -> None:
    graph = gradient(1024, 128, 512)
    assert onednn(graph, HERE) == 1
    assert lines(graph) == ["permute(%g, [1, 0])", "permute(%x, [1, 0])", "onednn_matmul(%3, %4)"]
    graph = gradient(1024, 512, 128)
    assert onednn(graph, HERE) == 1
    assert lines(graph) == [
        "permute(%g, [1, 0])",
        "permute(%x, [1, 0])",
        "onednn_matmul(%4, %3)",
        "permute(%5, [1, 0])",
        "clone(%6, memory_format=torch.contiguous_format)",
    ]
    graph = gradient(1024, 512, 128, out=True)
    assert onednn(graph, HERE) == 1
    assert lines(graph)[3:] == ["permute(%5, [1, 0])", "copy_(%out, %6)"]


def inputs_of(graph: fx.Graph, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Numbers for its inputs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [n.meta["val"].shape for n in graph.nodes if n.op == "placeholder"]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("shape", ((512, 256, 512), (1024, 512, 128), (1024, 128, 512)))
def test_the_same_values(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for out in (False, True):
        found: list[Tensor] = []
        for target in (Target(), HERE):
            graph = gradient(*shape, out=out)
            assert onednn(graph, target) == target.onednn
            given = inputs_of(graph, dtype)
            (((made,), _),) = VirtualRanks(Mesh(())).run(graph, nn.Module(), [given])
            assert made.dtype == dtype and made.is_contiguous()
            assert not out or made.data_ptr() == given[-1].data_ptr()
            found.append(made)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_the_same_values_in_every_form() -> None:
    found: list[list[Tensor]] = []
    for target in (Target(), HERE):
        graph = matmuls()
        onednn(graph, target)
        ((returned, _),) = VirtualRanks(Mesh(())).run(graph, nn.Module(), [inputs_of(graph)])
        found.append(returned)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "turned", "out", "count"),
    [
        ((256, 256, 256), False, False, 1),
        ((64, 64, 64), False, False, 0),  # a call of oneDNN takes longer to start
        ((1024, 1024, 16), False, False, 1),
        ((1024, 1024, 16), True, False, 1),  # the other one is laid out anew
        ((8, 65536, 8), True, False, 0),  # laying out either takes longer than the matmul
        ((1024, 16, 1024), False, False, 1),
        ((1024, 16, 1024), False, True, 0),  # copying the result does
        ((1024, 128, 1024), True, True, 1),
        ((0, 256, 256), False, False, 0),
    ],
)
def test_what_would_not_gain_stays(
    shape: tuple[int, int, int], turned: bool, out: bool, count: int
) -> None:
    m, k, n = shape
    b = Builder()
    x = b.given("x", m, k, kind="batch")
    if turned:
        x.meta["val"] = torch.empty(k, m).t()
    y, memory = b.given("y", k, n), b.given("out", m, n)
    made = b.call(aten.mm.out if out else aten.mm.default, x, y, shape=(m, n))
    if out:
        made.kwargs = {"out": memory}
    assert onednn(b.done([made], []), HERE) == count


def test_other_matmuls_stay() -> None:
    b = Builder()
    x, y = b.given("x", 256, 256, kind="batch"), b.given("y", 256, 256)
    matrix = b.call(aten.addmm.default, x, x, y)  # what is added is no bias
    scaled = b.call(aten.addmm.default, b.given("c", 256), x, y, shape=(256, 256))
    scaled.kwargs = {"beta": 2}
    narrow = b.given("narrow", 256, 256, kind="batch")
    narrow.meta["val"] = narrow.meta["val"].bfloat16()
    halves = b.call(aten.mm.default, narrow, narrow)
    assert onednn(b.done([matrix, scaled, halves], []), HERE) == 0


def wide() -> nn.Module:
    """Layers whose matmuls are worth a call of oneDNN for a batch of 256."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 96))


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matmuls the pass has rewritten, graph by graph."""
    found: list[int] = []

    def counted(graph: fx.Graph, setting: Setting) -> None:
        found.append(onednn(graph, setting.target))

    replace_row(monkeypatch, "onednn", on_program=counted, on_part=counted)
    return found


@pytest.mark.parametrize(
    "layout", ("data=2", "data=2 zero=3", "tensor=2", "micro=2", "pipe=2 micro=2")
)
def test_the_same_step(layout: str, rewritten: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_faster", lambda: True)
    model = wide()
    batch = (torch.randn(512, 96, generator=torch.Generator().manual_seed(0)),)
    same_step(squares, model, torch.optim.AdamW(model.parameters(), 1e-3), batch, layout)
    assert sum(rewritten) >= 5


def losses_of(steps: int = 3) -> list[float]:
    """What a step on one device returns."""
    model = wide()
    play = tutti.distribute(step, model, torch.optim.AdamW(model.parameters(), 1e-2))
    x = torch.randn(256, 96, generator=torch.Generator().manual_seed(0))
    return [float(play(x)) for _ in range(steps)]


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch is built without oneDNN"
)
def test_a_step_in_float32(rewritten: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to the step without the pass as sums in another order are; left out by its name."""
    monkeypatch.setattr(execute, "is_faster", lambda: True)
    have = losses_of()
    assert rewritten == [5]
    monkeypatch.setenv("TUTTI_WITHOUT", "onednn")
    assert losses_of() == pytest.approx(have, rel=1e-5) and rewritten == [5]


def agreed(says_no: int) -> bool:
    """On one rank: what all of them come to when one rank's processor is of another kind."""
    rank = torch.distributed.get_rank()
    before, module.is_faster = module.is_faster, lambda: rank != says_no
    try:
        return Groups({"data": 2}).onednn
    finally:
        module.is_faster = before


def test_every_rank_takes_the_same_matmuls(ranks: Ranks) -> None:
    assert ranks.run(agreed, -1, n=2) == [True, True]
    assert ranks.run(agreed, 1, n=2) == [False, False]
