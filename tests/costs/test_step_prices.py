"""The prices by which a step is cut: rates on processors, an H100's kernels and links on GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tutti.costs.collective_seconds import message_seconds
from tutti.costs.step_prices import StepPrices
from tutti.graph.analysis.cost import RATES, rates_for, seconds_of
from tutti.graph.ops import collectives
from tutti.hardware.cluster import Cluster
from tutti.layout import Mesh

aten = torch.ops.aten
MESH = Mesh.parse("pipe=2 data=8")


def logits(num_words: int, dtype: torch.dtype = torch.bfloat16) -> tuple[fx.Graph, fx.Node]:
    """A graph with the logits of so many words for 8,192 tokens of width 1,024."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"] = torch.empty(8192, 1024, dtype=dtype, device="meta")
    weight.meta["val"] = torch.empty(1024, num_words, dtype=dtype, device="meta")
    made = graph.call_function(aten.mm.default, (x, weight))
    made.meta["val"] = x.meta["val"] @ weight.meta["val"]
    graph.output(made)
    return graph, made


def prices(graph: fx.Graph, mesh: Mesh = MESH) -> StepPrices:
    return StepPrices.of([n.meta.get("val") for n in graph.nodes], mesh)


def test_an_odd_vocabulary_takes_several_times_as_long_on_a_gpu() -> None:
    seconds = []
    with rates_for("cuda"):
        for num in (50_257, 50_264):
            graph, made = logits(num)
            seconds.append(prices(graph).seconds(graph)[made])
    assert 4 < seconds[0] / seconds[1] < 7


def test_processors_have_rates() -> None:
    graph, made = logits(50_257)
    found = prices(graph)
    assert found.seconds(graph) == {made: seconds_of(made)}
    assert found.message(6e6) == 6e6 / RATES["cpu"].link


@pytest.mark.parametrize(("mesh", "crosses"), [("pipe=2 data=8", True), ("data=8 pipe=2", False)])
def test_messages_take_the_link_between_their_ranks(mesh: str, crosses: bool) -> None:
    graph, _ = logits(8)
    with rates_for("cuda"):
        found = prices(graph, Mesh.parse(mesh)).message(1e8)
    topology = Cluster.parse("16 x h100").topology
    assert found == message_seconds(1e8, topology, across_hosts=crosses)


def test_collectives_count_where_they_have_several_ranks() -> None:
    graph, made = logits(8)
    with graph.inserting_after(made):
        whole = graph.call_function(collectives.all_reduce, (made, ("tensor",), "sum"))
    whole.meta["val"] = made.meta["val"]
    with rates_for("cuda"):
        alone = prices(graph).seconds(graph)
        among = prices(graph, Mesh.parse("data=8 tensor=8")).seconds(graph)
    assert whole not in alone
    assert among[whole] > 0
    assert among[made] == alone[made]


def test_a_dtype_without_a_peak_has_a_price() -> None:
    """The file of an H100 has no peak for matmuls of whole numbers."""
    graph, made = logits(64, torch.int64)
    with rates_for("cuda"):
        assert prices(graph).seconds(graph)[made] > 0
