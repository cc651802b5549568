"""Ops written as a few simpler ones, and copies of views, have the values of the op."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from tutti.capture.spelling.canonical import canonicalize
from tutti.capture.spelling.compounds import COMPOUNDS
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.rules.samples.sample import Sample, f, ints, pairs, positive, sample, some

INF = float("inf")
COPIES = [
    sample("view_copy", f(4, 6), [3, 8]),
    sample("_reshape_alias_copy", f(4, 6), [3, 8], [8, 1]),
    sample("unsqueeze_copy", f(4, 6), 1),
    sample("squeeze_copy", f(4, 1)),
    sample("squeeze_copy.dim", f(4, 1, 1), 1),
    sample("squeeze_copy.dims", f(4, 1, 1), [1]),
    sample("alias_copy", f(4, 6)),
    sample("detach_copy", f(4, 6)),
    sample("expand_copy", f(4, 1), [3, 4, 6]),
    sample("t_copy", f(4, 6)),
    sample("transpose_copy.int", f(4, 6, 3), 0, -1),
    sample("permute_copy", f(4, 6, 3), [2, 0, 1]),
    sample("slice_copy.Tensor", f(4, 6), 1, 2, 5),
    sample("narrow_copy", f(4, 6), -1, -4, 2),
    sample("narrow_copy", f(4, 6), 1, 2, 3),
    sample("select_copy.int", f(4, 6), 1, 2),
    sample("diagonal_copy", f(4, 6), 1),
    sample("unfold_copy", f(4, 6), 1, 3, 2),
    sample("split_copy.Tensor", f(4, 6), 4, 1),
    sample("split_with_sizes_copy", f(4, 6), [1, 3]),
    sample("unbind_copy.int", f(3, 6)),
    sample("view_as_real_copy", pairs(4, 6)),
    sample("view_as_complex_copy", f(4, 2)),
    sample("zero", f(4, 6)),
    sample("fill.Tensor", f(4, 6), ints(9)),
    sample("copy", f(4, 6), ints(9, 6)),
    sample("add.Tensor", f(4, 6), 0),
]
SEVERAL = [
    sample("norm.Scalar", f(4, 6), 3),
    sample("norm.ScalarOpt_dim", f(4, 6), None, [1], True),
    sample("norm.ScalarOpt_dtype", f(4, 6), 2, dtype=torch.float64),
    sample("norm.ScalarOpt_dim_dtype", f(4, 6), INF, [0], False, dtype=torch.float64),
    *(sample("renorm", f(4, 6, 3), p, dim, 2.0) for p, dim in ((2, 0), (1, -1), (INF, 1))),
    sample("nansum", f(4, 6)),
    sample("nansum", f(4, 6), [1], True),
    sample("std_mean.correction", f(4, 6), [1], correction=0, keepdim=True),
    sample("std_mean.correction", f(4, 6)),
    sample("pixel_shuffle", f(2, 8, 3, 5), 2),
    sample("pixel_unshuffle", f(8, 6, 4), 2),
    *(sample("channel_shuffle", f(2, 6, *space), 3) for space in ((5,), (4, 5))),
    *(sample("rot90", f(4, 6, 3), k, dims) for k in (-1, 0, 1, 2, 3) for dims in ([0, 1], [2, -2])),
    sample("rot90", f(4, 6)),
    sample("baddbmm", f(4, 1, 3), f(4, 5, 6), f(4, 6, 3), beta=0.5, alpha=2.0),
    sample("addbmm", f(5, 3), f(4, 5, 6), f(4, 6, 3), beta=0.5, alpha=2.0),
    sample("addbmm", f(3), f(4, 5, 6), f(4, 6, 3), beta=0),
    sample("addr", f(4, 6), f(4), f(6)),
    sample("addr", f(6), f(4), f(6), beta=3, alpha=0.5),
    sample("trace", f(4, 6)),
    sample("block_diag", [f(2, 3), f(), f(4), f(3, 1)]),
    sample("take", f(4, 6), ints(24, 3, 5)),
    sample("put", f(4, 6), ints(24, 3, 5), f(15), True),
    *(sample("multi_margin_loss", f(5, 6), ints(6, 5), 2, 0.5, w, how)
      for w in (None, positive(6)) for how in (0, 1, 2)),
    sample("multi_margin_loss", f(5, 6), ints(6, 5)),
    *(sample("multi_margin_loss_backward", f(), f(5, 6), ints(6, 5), 1, 0.5, w, how)
      for w in (None, positive(6)) for how in (1, 2)),
    *(sample("multilabel_margin_loss_forward", f(5, 6), some(6, -1, 5, 6), how) for how in (0, 1, 2)),
    *(sample("multilabel_margin_loss_backward", f(), f(5, 6), some(6, -1, 5, 6), how, positive(5, 6))
      for how in (1, 2)),
]  # fmt: skip


def rewritten(call: Sample) -> fx.Graph:
    """The call as a captured step has it."""
    mode = FakeTensorMode()
    node = call.node(mode)
    graph, several = node.graph, isinstance(node.meta["val"], tuple | list)
    results: Any = node
    if several:
        results = tuple(_item(node, i) for i in range(len(node.meta["val"])))
    graph.output(results)
    canonicalize(graph, nn.Module(), mode)
    return graph


def _item(node: fx.Node, i: int) -> fx.Node:
    item = node.graph.call_function(getitem, (node, i))
    item.meta["val"] = node.meta["val"][i]
    return item


@pytest.mark.parametrize("call", [*COPIES, *SEVERAL], ids=str)
def test_the_same_values(call: Sample) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [o.made(generator) for o in call.operands()]
    if "nansum" in str(call.op):
        values[0][1, 2] = torch.nan
    graph = rewritten(call)
    have = VirtualRanks(Mesh()).run(graph, nn.Module(), [values])[0]
    want = call.call(values)
    several = isinstance(want, list | tuple)
    for a, b in zip(have, want, strict=True) if several else [(have, want)]:
        assert isinstance(a, Tensor) and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("call", COPIES, ids=str)
def test_no_copy_stays(call: Sample) -> None:
    assert call.op not in {n.target for n in rewritten(call).nodes}


@pytest.mark.parametrize("op", [torch.ops.aten.copy.default, torch.ops.aten.fill.Tensor], ids=str)
def test_a_number_goes_to_the_gpu(op: Any) -> None:
    """`x[..., 0] = 7` writes a number that Python keeps on the CPU."""
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        made = torch.empty(4, device="cuda"), torch.empty((), dtype=torch.int64)
    x, y = (graph.placeholder(name) for name in "xy")
    node = graph.call_function(op, (x, y))
    for one, val in zip((x, y, node), (*made, made[0]), strict=True):
        one.meta["val"] = val
    graph.output(node)
    canonicalize(graph, nn.Module(), mode)
    (result,) = graph.output_node().args
    assert isinstance(result, fx.Node) and result.target is not op
    val = result.meta["val"]
    assert (val.shape, val.dtype, val.device.type) == ((4,), torch.float32, "cuda")


def test_every_compound_has_a_call() -> None:
    assert set(COMPOUNDS) == {c.op for c in SEVERAL}
