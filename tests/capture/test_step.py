"""What a capture knows: regions, modules, source lines, buffers, tied weights, random streams."""

from __future__ import annotations

import linecache
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import zoo
from subjects import subject
from tutti.capture.captured import Captured
from tutti.capture.step import capture
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.graph.randomness.draw import draw
from tutti.layout import Layout, Mesh
from tutti.verification.verdict import Subject
from zoo_steps import token_batch

aten = torch.ops.aten
REGIONS = ("forward", "backward", "update")


def calls(captured: Captured, op: Any) -> list[fx.Node]:
    return [n for n in captured.graph.nodes if n.target is op]


def line_of(node: fx.Node, key: str = "source") -> str:
    path, _, number = node.meta[key].rpartition(":")
    return linecache.getline(path, int(number))


def run(captured: Captured, *feed: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What the captured graph returns, and the state after it."""
    known = {s.name: s.tensor.detach() for s in captured.state}
    for more in feed:
        known |= more
    out, new = VirtualRanks(Mesh()).run(
        captured.graph, captured.owner, [[known[n] for n in captured.inputs]]
    )[0]
    return out, dict(zip(captured.updated, new, strict=True))


def test_every_node_has_a_region_and_they_come_in_order() -> None:
    nodes = [n for n in subject("gpt").captured.graph.nodes if n.op == "call_function"]
    regions = [n.meta["region"] for n in nodes]
    assert set(regions) == set(REGIONS)
    first = [regions.index(r) for r in REGIONS]
    assert first == sorted(first)
    assert "forward" not in regions[first[1] :]
    assert set(regions[first[2] :]) == {"update"}


def test_clipping_and_optimizer_belong_to_the_update() -> None:
    captured = subject("gpt").captured
    (norm,) = [n for n in calls(captured, aten.sqrt.default) if not n.meta["val"].ndim][:1]
    assert norm.meta["region"] == "update" and "clip_grad_norm_" in line_of(norm)
    updates = dict(zip(captured.output[1], captured.updated, strict=True))
    assert all(n.meta["region"] == "update" for n in updates)
    assert all("optimizer.step()" in line_of(n) for n in updates)


def test_nodes_know_module_and_source_line() -> None:
    captured = subject("gpt").captured
    attention = calls(captured, aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert [n.meta["module"] for n in attention] == ["blocks.0.attn", "blocks.1.attn"]
    assert all("F.scaled_dot_product_attention" in line_of(n) for n in attention)
    backward = calls(captured, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    assert [n.meta["module"] for n in backward] == ["blocks.1.attn", "blocks.0.attn"]
    assert all("F.scaled_dot_product_attention" in line_of(n, "forward_source") for n in backward)
    assert all("loss.backward()" in line_of(n) for n in backward)


def test_ops_without_a_gradient_do_not_rename_the_backward_before_them() -> None:
    captured = subject("llama").captured  # its rotary embedding counts positions after the lookup
    (backward,) = calls(captured, aten.embedding_dense_backward.default)
    assert backward.meta["module"] == "model.embed_tokens"


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_nodes_of_a_library_model_know_their_modules(name: str) -> None:
    captured = subject(name).captured
    matmuls = calls(captured, aten.mm.default) + calls(captured, aten.addmm.default)
    modules = {n for n, _ in zoo.CASES[name].build()[1].named_modules()}
    assert {n.meta["module"] for n in matmuls} <= modules
    owned = [n for n in matmuls if n.meta["module"]]
    assert len(owned) == len(matmuls) and all(n.meta["source"] for n in matmuls)


def test_the_graph_is_functional() -> None:
    """No node writes to what it is given."""
    for name in ("gpt", "resnet", "adafactor"):
        for node in subject(name).captured.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                writes = [a for a in node.target._schema.arguments if a.alias_info]
                assert not any(a.alias_info.is_write for a in writes), node


def test_inputs_are_state_then_numbers_then_the_batch() -> None:
    captured = subject("bert").captured
    kinds = [captured.kinds[n] for n in captured.inputs]
    order = ["parameter", "buffer", "slot", "hyper", "batch"]
    assert kinds == sorted(kinds, key=order.index)
    assert captured.inputs[-3:] == ["batch.0", "batch.1", "batch.2"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        return self.norm(self.conv(x)).square().mean()


def test_buffers_are_updated() -> None:
    torch.manual_seed(0)
    model = Normed()
    x = torch.randn(8, 3, 6, 6)
    captured = capture(lambda m, x: m(x), model, None, (x,))
    changed = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen"]
    assert sorted(captured.updated) == sorted(changed)
    assert not model.seen and not model.norm.num_batches_tracked  # tracing touched nothing
    (loss,), new = run(captured, {"batch.0": x})
    torch.testing.assert_close(loss, model(x).detach())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(new[name], buffer)


def test_evaluation_updates_nothing() -> None:
    model = Normed().eval()
    captured = capture(lambda m, x: m.norm(m.conv(x)), model, None, (torch.randn(2, 3, 6, 6),))
    assert captured.updated == []


def test_a_selective_checkpoint_recomputes_what_its_policy_says() -> None:
    """It keeps the results of matmuls: the backward recomputes the GELU alone, for the second matmul."""

    def policy(_context: Any, op: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        out: Any = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = capture(step, model, optimizer, (torch.randn(4, 8),))
    counts = Counter((n.target, n.meta["region"]) for n in captured.graph.nodes)
    assert counts[aten.gelu.default, "forward"] == counts[aten.gelu.default, "backward"] == 1
    assert (counts[aten.addmm.default, "forward"], counts[aten.addmm.default, "backward"]) == (2, 0)


def test_recomputed_blocks_draw_the_same_numbers() -> None:
    """Checkpointing runs the forward again in the backward: with the masks of the first time."""
    captured = subject("checkpoint").captured
    streams = Counter(n.args[5] for n in calls(captured, draw))
    regions = {
        stream: {n.meta["region"] for n in calls(captured, draw) if n.args[5] == stream}
        for stream in streams
    }
    again = [s for s, r in regions.items() if r == {"forward", "backward"}]
    assert len(again) == 4 and all(streams[s] == 2 for s in again)  # two dropouts a block
    assert subject("checkpoint").capture.errors.worst < 1e-4
    plain = subject("checkpoint").verdict(Layout.parse("data=2"))
    assert plain.ok


def test_streams_are_numbered_as_the_step_draws() -> None:
    captured = subject("gpt_tied").captured
    streams = [n.args[5] for n in calls(captured, draw)]
    assert streams == sorted(set(streams)) and len(streams) == 3


def double(model: nn.Module, optimizer: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Two models' worth of backward calls, and gradients through `torch.autograd.grad`."""
    optimizer.zero_grad()
    logits = model(tokens)
    first = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    (slope,) = torch.autograd.grad(first, logits, retain_graph=True)
    first.backward(retain_graph=True)
    (slope.detach().square().sum() * logits.square().mean()).backward()
    optimizer.step()
    return first


def test_several_backward_calls_add_up() -> None:
    assert subject("two_losses").capture.errors.worst < 1e-4
    torch.manual_seed(0)
    model = zoo.GPT(num_layers=1)
    found = Subject(double, model, zoo.sgd(model), token_batch(0)).verdict(Layout.parse("data=2"))
    assert found.ok, str(found)


def test_returned_values_keep_their_structure() -> None:
    def step(model: nn.Module, x: Tensor) -> dict[str, Any]:
        y = model(x)
        return {"loss": y.sum(), "parts": (y, 3), "name": "a"}

    x = torch.randn(4, 16)
    model = nn.Linear(16, 2)
    captured = capture(step, model, None, (x,))
    out, _ = run(captured, {"batch.0": x})
    found = torch.utils._pytree.tree_unflatten(out, captured.returned)
    assert found["parts"][1] == 3 and found["name"] == "a"
    torch.testing.assert_close(found["parts"][0], model(x).detach())
    assert len(tree_leaves(found)) == 4


def test_equal_views_are_one_node() -> None:
    """Query, key and value flatten the same input: one view, so that one reshard serves them."""
    for node in subject("gpt").captured.graph.nodes:
        views = [u for u in node.users if u.target is aten.reshape.default]
        keys = [(tuple(u.args[1]), u.meta["region"]) for u in views]
        assert len(set(keys)) == len(keys)
