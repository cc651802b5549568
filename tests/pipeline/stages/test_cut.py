"""Where stages are cut: against all other cuts, by name, and where an earlier program has left its state."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
import torch
from torch import Tensor, fx, nn

import stacks
from small_steps import trained
from subjects import program
from tutti.capture.step import capture
from tutti.errors import LayoutError
from tutti.graph.analysis.cost import nbytes_of, rates_for
from tutti.layout import Layout, Mesh
from tutti.partition.partition import Program, partition
from tutti.passes.pass_table import ready_to_split
from tutti.passes.target import Target
from tutti.pipeline.micro_batches.moments import Moments, moments_of
from tutti.pipeline.ready import in_time
from tutti.pipeline.stages.cut import Stages, _StageCutter, cut
from tutti.propagate.plan import plan


def moments(made: Program) -> Moments:
    """When each node of a program runs."""
    graph = ready_to_split(made, Target(donated=frozenset()), ())
    return moments_of(graph, made.layout.micro, made.layout)


def stacked(name: str, layout: str = "micro=4") -> Moments:
    return moments(stacks.subject(name).program(Layout.parse(layout)))


def _readers(node: fx.Node, found: Stages) -> list[int]:
    return [found.stage[u] for u in node.users if u in found.forward]


class LargeHead(nn.Module):
    """Small layers, and logits of many classes: no message but theirs is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.head = nn.Linear(64, 20_000)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


classify = trained(lambda model, x, y: nn.functional.cross_entropy(model(x), y))


@pytest.mark.parametrize("num_stages", [2, 8])
def test_large_logits_stay_in_one_stage(num_stages: int) -> None:
    """Equal shares of the forward cut between the logits and the loss; between hosts this costs most."""
    model = LargeHead()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4096, 64), torch.randint(0, 20_000, (4096,))
    one = capture(classify, model, optimizer, batch)
    with rates_for("cuda"):
        made = moments(partition(plan(one, Layout.parse("micro=4"))))
        found = cut(made, num_stages, mesh=Mesh.parse(f"pipe={num_stages} data=8"))
    large = [n for n in found.stage if n in found.forward and nbytes_of(n) >= 1024 * 20_000 * 4]
    assert large
    assert {found.stage[n] for n in large} == {num_stages - 1}


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [(n, k) for n in ("stack", "thrice", "summed") for k in (2, 3)],
)
def test_no_other_cut_is_much_better(name: str, num_stages: int) -> None:
    made = stacked(name)
    cutter = _StageCutter(made, num_stages)
    positions = range(1, len(cutter.forward))
    costs = {c: cutter.cost(c) for c in combinations(positions, num_stages - 1)}
    chosen = cutter.cost(cutter.balanced())
    assert chosen <= 1.06 * min(costs.values())
    # It is a choice: most cuts are worse by far.
    assert sorted(costs.values())[len(costs) // 2] > 1.2 * chosen


@pytest.mark.parametrize("name", ["gpt", "unet", "vit"])
def test_no_other_cut_of_a_model_in_two_is_much_better(name: str) -> None:
    made = moments(program(name, "micro=4"))
    cutter = _StageCutter(made, 2)
    best = min(cutter.cost([c]) for c in range(1, len(cutter.forward)))
    assert cutter.cost(cutter.balanced()) <= 1.05 * best


@pytest.mark.parametrize("name", ["gpt", "unet", "thrice"])
def test_the_work_of_a_cut_is_that_of_its_program(name: str) -> None:
    """The seconds of each stage, and of the messages between them: activations there, gradients back."""
    layout = Layout.parse("pipe=2 micro=4")
    made = stacks.subject(name).program(layout) if name == "thrice" else program(name, str(layout))
    cutter = _StageCutter(moments(made), 2)
    cuts = cutter.balanced()
    work, (moved,) = cutter._work(cuts), cutter._messages(cutter.stages(cuts).stage, 1)
    timed = in_time(made)
    # A weight that several stages read has its gradients added after the micro-batches.
    assert timed.stages.seconds() == pytest.approx(work, rel=0.05 if name == "thrice" else 1e-6)
    messages = [timed.bodies[0].messages, timed.bodies[1].messages]
    both = {key: names for found in messages for key, names in found.items()}
    assert {(a, b) for a, _, b in both} == {(0, 1), (1, 0)}
    vals = timed.bodies[0].vals | timed.bodies[1].vals
    nbytes = sum(vals[n].nbytes for names in both.values() for n in names)
    assert sum(moved) == nbytes


@pytest.mark.parametrize("name", ["stack", "thrice", "penalty"])
def test_every_node_has_a_stage_and_values_go_forward(name: str) -> None:
    made = stacked(name)
    found = cut(made, 3)
    assert found.forward <= set(found.stage) and not found.free & set(found.stage)
    assert set(found.stage) | found.free == set(made.during())
    for node in found.forward:
        assert all(found.stage[node] <= s for s in _readers(node, found))
    for node in set(found.stage) - found.forward:
        grads = [u for u in node.users if u in found.stage]
        assert all(found.stage[u] <= found.stage[node] for u in grads)


def test_cut_where_modules_begin() -> None:
    made = stacked("stack")
    found = cut(made, 3, names=("layers.1", "layers.3"))
    modules: dict[int, set[str]] = {}
    for node in found.forward:
        if (module := node.meta.get("module", "")).startswith("layers"):
            modules.setdefault(found.stage[node], set()).add(module)
    assert modules == {
        0: {"layers.0"},
        1: {"layers.1", "layers.2"},
        2: {"layers.3"},
    }


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("layers.2",), "1 names for 3 stages"),
        (("layers.2", "layer.3"), '"layer.3" names no module'),
        (("layers.3", "layers.2"), "in the order"),
        (("layers.0", "layers.2"), "in the order"),
    ],
)
def test_names_that_cut_nothing(names: Sequence[str], what: str) -> None:
    with pytest.raises(LayoutError) as caught:
        cut(stacked("stack"), 3, names=names)
    assert what in caught.value.what


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("name", ["stack", "thrice", "common"])
def test_a_later_program_leaves_state_where_it_is(name: str, schedule: str) -> None:
    """Cut at the homes of an earlier program, each stage works on the state of its own pipeline rank."""
    made = stacks.subject(name).program(Layout.parse(f"pipe=2 micro=4 schedule={schedule}"))
    first = in_time(made)
    later = in_time(made, homes=first.owners)
    assert later.owners == first.owners
    rank_of = first.schedule.rank_of
    for timed in (first, later):
        at_home = [
            rank_of(timed.stages.stage[n]) in timed.owners[x.meta["name"]]
            for n in timed.stages.forward
            for x in n.all_input_nodes
            if x.meta.get("kind") == "parameter"
        ]
        # Only a weight that several stages read is away from home.
        assert at_home.count(False) <= (2 if name == "thrice" else 0)
    if schedule == "1f1b":
        reads = [
            [timed.stages.stage[n] for n in timed.stages.forward if _reads_home(n, first.owners)]
            for timed in (first, later)
        ]
        assert sorted(reads[0]) == sorted(reads[1])


def _reads_home(node: fx.Node, owners: Mapping[str, frozenset[int]]) -> bool:
    """Whether it reads a parameter that one pipeline rank alone keeps."""
    return any(len(owners.get(x.meta.get("name", ""), ())) == 1 for x in node.all_input_nodes)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_no_cut_takes_a_tuple_apart_elsewhere(name: str) -> None:
    """A message holds tensors: the parts of a result of several tensors stay with it."""
    cutter = _StageCutter(moments(program(name, "micro=4")), 2)
    parts = [n for n in cutter.seconds if n.target is operator.getitem]
    assert any(n in cutter.position for n in parts)
    for position in range(1, len(cutter.forward)):
        stage = cutter.stages([position]).stage
        assert all(stage[n] == stage[n.args[0]] for n in parts if n.args[0] in stage)  # type: ignore[index]
