"""Each decomposition has the values, shapes and dtypes of the op that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from brute_force import MODE, as_list, operands_in
from tutti.graph.edits.edit import Editor
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.rules import is_tensor_call, rule_of
from tutti.rules.decompositions import DECOMPOSITIONS
from tutti.rules.rule import results_of
from tutti.rules.samples.op_samples import FAMILIES
from tutti.rules.samples.sample import Operand, Sample, f, half, ints, sample

CALLS = [c for calls in FAMILIES.values() for c in calls if c.op in DECOMPOSITIONS]


def decomposed(call: Sample) -> tuple[fx.Node, Any]:
    """The call in a graph, and what its decomposition emits behind it (None: it declines)."""
    node = call.node(MODE)
    output = node.graph.output(node)
    return node, DECOMPOSITIONS[call.op](Editor(node.graph, MODE).at(output), node)


def played(node: fx.Node, new: Any, values: list[Tensor]) -> list[Any]:
    end = next(iter(reversed(node.graph.nodes)))
    end.args = (new,)
    return as_list(VirtualRanks(Mesh()).run(node.graph, nn.Module(), [values])[0])


def check(call: Sample, values: list[Tensor]) -> None:
    node, new = decomposed(call)
    assert new is not None
    have, want = played(node, new, values), as_list(call.call(values))
    vals = results_of(node)
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        if a is None:
            assert vals[i] is None, f"{call}: result {i} is missing"
            continue
        torch.testing.assert_close(
            a, b, rtol=1e-10, atol=1e-10, msg=lambda m, i=i: f"{call} [{i}]\n{m}"
        )


def _puts(call: Sample) -> bool:
    """Values that are put at places, not added there, cannot be taken apart."""
    return "index_put" in str(call.op) and True not in call.args


def _declines(call: Sample) -> bool:
    """A batch norm that evaluates, a convolution without a bias: nothing keeps a factor whole."""
    if _puts(call):
        return True
    if "convolution_backward" in str(call.op):
        return not call.args[-1][2]
    if "convolution" in str(call.op):
        return call.args[2] is None
    return "batch_norm" in str(call.op) and False in call.args


@pytest.mark.parametrize("call", [c for c in CALLS if not _declines(c)], ids=str)
def test_values(call: Sample) -> None:
    generator = torch.Generator().manual_seed(1)
    check(call, [o.made(generator) for o in call.operands()])


def test_every_decomposition_has_a_sample() -> None:
    assert {c.op for c in CALLS} == set(DECOMPOSITIONS)


@pytest.mark.parametrize("call", [c for c in CALLS if _declines(c)], ids=str)
def test_what_needs_no_decomposition_has_none(call: Sample) -> None:
    node, new = decomposed(call)
    rule = rule_of(node)
    assert new is None and rule is not None and (_puts(call) or not rule.whole)


@pytest.mark.parametrize("call", [c for c in CALLS if not _declines(c)], ids=str)
def test_nothing_emitted_needs_the_factors_whole(call: Sample) -> None:
    """What is left after a decomposition may be split wherever the op itself may not."""
    node, _ = decomposed(call)
    inputs = operands_in(node)
    for made in node.graph.nodes:
        if made is node or not is_tensor_call(made) or made in inputs:
            continue
        rule = rule_of(made)
        assert rule is not None and not {f for f in rule.whole if not f.startswith("w")}, made


PLACED = [
    (sample("index_add", f(12, 4), 0, ints(12, 8), f(8, 4)), 1, (-1, 12)),
    (sample("index_put", f(12, 4), [ints(12, 8), ints(4, 8)], f(8), True), 1, (-13, 12)),
    (sample("index_put", f(12, 4), [ints(12, 8), ints(4, 8)], f(8), True), 2, (-5, 4)),
]


@pytest.mark.parametrize(("call", "at", "wrong"), PLACED, ids=str)
def test_places_out_of_range_are_errors(call: Sample, at: int, wrong: tuple[int, ...]) -> None:
    """Also an index that would be in range once the dims with an index are one."""
    generator = torch.Generator().manual_seed(1)
    for index in wrong:
        values = [o.made(generator) for o in call.operands()]
        values[at][5] = index
        node, new = decomposed(call)
        node.graph.output_node().args = (new,)
        node.graph.erase_node(node)
        with pytest.raises(IndexError, match=f"index {index} is out of bounds"):
            played(new, new, values)


HALF = half(4, 6, 12)
LOW = [
    sample("_softmax", HALF, -1, False),
    sample("_log_softmax", HALF, 1, False),
    sample("native_layer_norm", HALF, [12], half(12), half(12), 1e-5),
    sample("native_layer_norm_backward", HALF, HALF, [12], Operand((4, 6, 1), torch.float32, f(1).fill),
           Operand((4, 6, 1), torch.float32, f(1).fill), half(12), half(12), [True, True, True]),
    sample("_fused_rms_norm", HALF, [12], half(12), None),
    sample("linalg_vector_norm", HALF, 2, [1], False, dtype=torch.float32),
    sample("var_mean.correction", HALF, [1]),
    sample("logsumexp", HALF, [1]),
    sample("_log_softmax_backward_data", HALF, HALF, 1, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("call", LOW, ids=str)
def test_dtypes_of_low_precision_stay(call: Sample) -> None:
    node, new = decomposed(call)
    for made, want in zip(as_list(new), results_of(node), strict=True):
        if isinstance(want, Tensor):
            assert made.meta["val"].dtype == want.dtype, call
            assert made.meta["val"].shape == want.shape, call


@pytest.mark.parametrize("op", ["_softmax", "_log_softmax", "logsumexp"])
def test_large_values_do_not_overflow(op: str) -> None:
    x = 1e4 + torch.randn(4, 6, dtype=torch.float64)
    x[0, 1] = -torch.inf
    call = sample(op, f(4, 6), [1]) if op == "logsumexp" else sample(op, f(4, 6), 1, False)
    check(call, [x])


def test_the_logsumexp_of_nothing_is_minus_infinity() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    x[2] = -torch.inf
    check(sample("logsumexp", f(4, 6), [1]), [x])
