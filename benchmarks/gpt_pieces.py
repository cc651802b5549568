"""The work of a GPT's pieces, from tutti's own captured and partitioned program of one block.

The embeddings, one layer, and the logits with the loss: any number of layers and of pipeline stages has the
same pieces. The program is that of one micro-batch on the ranks of one `tensor` group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from benchmarks.megatron_gpt import PLACE, Gpt, has_fused_softmax, train_step
from tutti.capture.captured import copied
from tutti.capture.step import capture
from tutti.costs.graph_seconds import GraphWork, work_of
from tutti.graph.analysis.state import is_state
from tutti.graph.ops import collectives
from tutti.layout import Layout
from tutti.partition.partition import partition
from tutti.propagate.plan import plan

aten = torch.ops.aten
PIECES = ("first", "layer", "last")


@dataclass(frozen=True)
class GptShape:
    """What the program of a block depends on."""

    width: int
    heads: int
    sequence: int
    vocabulary: int
    micro_batch: int
    tensor: int
    fuses_residual: bool


@dataclass(frozen=True)
class Pieces:
    """The work of each piece, `(piece, "forward")` and `(piece, "backward")`, and its local parameters."""

    work: Mapping[tuple[str, str], GraphWork]
    num_parameters: Mapping[str, int]


@cache
def pieces_of(shape: GptShape) -> Pieces:
    """Capture and partition a GPT of one layer, on meta tensors."""
    fused = has_fused_softmax(shape.micro_batch, shape.heads // shape.tensor)
    with torch.device("meta"):
        model = Gpt(
            width=shape.width,
            heads=shape.heads,
            layers=1,
            sequence=shape.sequence,
            vocabulary=shape.vocabulary,
            fused_softmax=fused,
        ).half()
        tokens = torch.empty(shape.micro_batch, shape.sequence, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    captured = capture(train_step, model, optimizer, (tokens, tokens))
    layout = Layout.parse(f"tensor={shape.tensor}" if shape.tensor > 1 else "data=1")
    graph = partition(plan(copied(captured), layout, PLACE)).graph
    sum_in_half(graph)
    work = work_of(graph, fused=lambda node: not _is_alone(node, shape.fuses_residual, fused))
    of = _piece_by_node(graph)
    regions = ("forward", "backward")
    return Pieces(
        {
            (p, r): work.where(lambda n, key=(p, r): of.get(n) == key)
            for p in PIECES
            for r in regions
        },
        _parameters(graph),
    )


def sum_in_half(graph: fx.Graph) -> None:
    """Let all-reduces add in their value's own dtype, as Megatron does; tutti adds in float32."""
    for node in list(graph.nodes):
        if node.target is not collectives.all_reduce or len(node.users) != 1:
            continue
        wide, narrow = node.args[0], next(iter(node.users))
        casts = {wide.target, narrow.target} == {aten._to_copy.default}
        if casts and wide.args[0].meta["val"].dtype == narrow.meta["val"].dtype:
            node.args = (wide.args[0], *node.args[1:])
            node.meta = {**node.meta, "val": narrow.meta["val"]}
            narrow.replace_all_uses_with(node)
            graph.erase_node(narrow)
            if not wide.users:
                graph.erase_node(wide)


def _is_alone(node: fx.Node, fuses_residual: bool, fuses_softmax: bool) -> bool:
    """Whether an op is a kernel of its own."""
    if _module(node).endswith("softmax"):
        return not fuses_softmax
    return (
        _module(node).endswith("residual") and node.target is aten.add.Tensor and not fuses_residual
    )


def _module(node: fx.Node) -> str:
    return node.meta.get("module") or ""


def _piece_by_node(graph: fx.Graph) -> dict[fx.Node, tuple[str, str]]:
    """The piece and region of each node: the layer by its module, the others by their side of it."""
    nodes = [n for n in graph.nodes if n.meta.get("region") in ("forward", "backward")]
    inside = {
        r: [n for n in nodes if _in_layer(n) and n.meta["region"] == r]
        for r in ("forward", "backward")
    }
    position = {n: i for i, n in enumerate(graph.nodes)}
    begin = position[inside["forward"][0]]
    end = position[inside["backward"][-1]]
    found = {}
    for node in nodes:
        outside = position[node] < begin or position[node] > end
        piece = "layer" if _in_layer(node) else "first" if outside else "last"
        found[node] = piece, node.meta["region"]
    return found


def _in_layer(node: fx.Node) -> bool:
    """A collective belongs to the piece that made its operand."""
    source = node.args[0] if node.target in collectives.COLLECTIVES else node
    return isinstance(source, fx.Node) and _module(source).startswith("blocks.")


def _parameters(graph: fx.Graph) -> dict[str, int]:
    found: dict[str, int] = dict.fromkeys(PIECES, 0)
    for node in graph.nodes:
        if is_state(node):
            name = node.meta["name"]
            piece = "layer" if "blocks." in name else "last" if "norm" in name else "first"
            found[piece] += node.meta["val"].numel()
    return found
