"""Rules of ops that only a GPU runs: here their text on fake tensors, on a GPU the brute force too.

The fused attention of GPUs has no CPU kernel, so without a GPU these rules are not played: what is
checked is that terms, shapes and whole factors fit what the ops say of themselves (fake CUDA tensors
need no CUDA).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from brute_force import (
    MODE,
    Way,
    as_list,
    assignments,
    check_terms,
    choice_of,
    operands_in,
    parts_of,
    written,
)
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import assemble
from tutti.passes.attention_memory import attention_memory
from tutti.rules import rule_of
from tutti.rules.rule import results_of
from tutti.rules.samples.gpu_samples import GPU
from tutti.rules.samples.sample import Operand, Sample, half, sample
from tutti.torch_private.op_tables import schema_of

_CAUSAL = [c for c in GPU if True in c.args]


def _free(call: Sample) -> set[str]:
    rule = rule_of(call.node(MODE, "cuda"))
    assert rule is not None
    return set(rule.factors) - rule.whole


@pytest.mark.parametrize("call", GPU, ids=str)
def test_terms_fit_the_shapes(call: Sample) -> None:
    node = call.node(MODE, "cuda")
    rule = rule_of(node)
    assert rule is not None
    check_terms(rule, node)


@pytest.mark.parametrize("call", [c for c in GPU if "attention" in str(c.op)], ids=str)
def test_batch_and_heads_split_and_keys_stay_whole(call: Sample) -> None:
    free = _free(call)
    assert {"b", "g"} <= free
    assert not free & {"t", "d", "e"}


@pytest.mark.parametrize("call", GPU, ids=str)
def test_local_results_have_the_shapes_of_the_op_on_local_operands(call: Sample) -> None:
    node = call.node(MODE, "cuda")
    rule = rule_of(node)
    assert rule is not None
    played = 0
    for mesh, assigned in assignments(rule):
        inputs = operands_in(node)
        shapes = [tuple(x.meta["val"].shape) for x in inputs]
        choice = choice_of(rule, node, shapes, Way(mesh, assigned))
        if choice is None:
            continue
        graph, made = written(node, rule, choice, mesh)
        locals_ = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        with MODE:
            real = as_list(call.call(locals_))
        for i, (a, b) in enumerate(zip(real, as_list(made.meta["val"]), strict=True)):
            if isinstance(a, Tensor):
                assert a.shape == b.shape, f"{rule}, {mesh}, {assigned}: result {i}"
        played += 1
    assert played > 1


def test_seeds_are_never_pending() -> None:
    node = sample("_scaled_dot_product_flash_attention", *[half(4, 6, 64, 16)] * 3).node(
        MODE, "cuda"
    )
    rule = rule_of(node)
    assert rule is not None
    seeds = [i for i, r in enumerate(results_of(node)) if i > 1 and r is not None]
    assert seeds and not any(rule.reduced(i) for i in seeds)


def test_the_memory_efficient_kernel_splits_queries_by_blocks() -> None:
    def free(num_queries: int) -> set[str]:
        q = half(4, 6, num_queries, 16)
        return _free(sample("_scaled_dot_product_efficient_attention", q, q, q, None, True))

    assert "s" in free(64) and "s" not in free(40)


def _with_results(call: Sample, values: list[Tensor]) -> list[Tensor]:
    """The operands of a backward, with the results of the forward: it takes its weights from them."""
    name = str(call.op).split(".")[1]
    if "attention_backward" not in name:
        return values
    forward = getattr(torch.ops.aten, name.removesuffix("_backward")).default
    names = [a.name for a, x in zip(schema_of(call.op).arguments, call.args, strict=False)]
    place = {n: values[i] for i, n in enumerate(n for n, x in zip(names, call.args, strict=True)
                                                if isinstance(x, Operand))}  # fmt: skip
    given = [place["query"], place["key"], place["value"]]
    if "flash" not in name:
        given += [place.get("attn_bias"), True]
    made = forward(
        *given, 0.0, call.args[names.index("is_causal")] if "is_causal" in names else False
    )
    place |= {"out": made[0], "logsumexp": made[1]}
    return list(place.values())


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: fused GPU attention not run"
)
@pytest.mark.parametrize("call", GPU, ids=str)
def test_every_way_to_split_on_a_gpu(call: Sample) -> None:
    node = call.node(MODE, "cuda")
    rule = rule_of(node)
    assert rule is not None
    generator = torch.Generator().manual_seed(0)
    values = _with_results(call, [o.made(generator).cuda() for o in call.operands()])
    dense = as_list(call.call(values))
    for mesh, assigned in assignments(rule):
        shapes = [tuple(v.shape) for v in values]
        choice = choice_of(rule, node, shapes, Way(mesh, assigned))
        if choice is None:
            continue
        graph: fx.Graph = written(node, rule, choice, mesh)[0]
        attention_memory(graph)
        fed = [
            parts_of(v, s, mesh, generator) for v, s in zip(values, choice.operands, strict=True)
        ]
        ranks = [[parts[r] for parts in fed] for r in range(mesh.num_ranks)]
        played = [as_list(p) for p in VirtualRanks(mesh).run(graph, nn.Module(), ranks)]
        for i, (want, sharding) in enumerate(zip(dense, choice.results, strict=True)):
            if i in rule.apart or not isinstance(want, Tensor):
                continue
            have = assemble([p[i] for p in played], sharding, mesh)
            torch.testing.assert_close(have.float(), want.float(), rtol=2e-2, atol=2e-2)
