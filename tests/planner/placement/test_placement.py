"""Found placements against those of Megatron-LM: bytes over `tensor`, predicted time, words, numbers."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tutti.capture.captured import Captured, copied
from tutti.capture.step import capture
from tutti.costs.graph_seconds import CollectiveCall
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.planner.placement import placement
from tutti.planner.placement.candidate_cost import Costing
from tutti.planner.placement.counted_programs import NO_NODE, CountedPrograms
from tutti.planner.placement.placement import (
    Placement,
    cost_of,
    find_place,
    found_seeds,
    programs_of,
)
from tutti.planner.placement.reduced import TIMES, mark_depth, reduced
from tutti.planner.placement.yardstick import Yardstick
from tutti.propagate.plan import plan
from tutti.report.collective_records import records
from tutti.report.explanation import explain
from tutti.verification import verdict
from tutti.verification.verdict import Subject

sys.path.append(str(Path(__file__).parent))
from hand_placed import MODELS, VOCABULARY, texts, train_step

EXAMPLES = Path(__file__).parents[3] / "examples"
# The number of ways changes which dims divide, and no rule: every model has one of two.
CASES = list(zip(MODELS, cycle((2, 4)), strict=False))
WAYS = dict(CASES)
# A decision must save this share of the time, and a hand-written placement may have one that saves less.
WORTH = 1.005


@cache
def subject(name: str) -> Subject:
    return Subject(*MODELS[name].arguments(), steps=1)


def captured(name: str) -> Captured:
    return subject(name).captured


@cache
def programs(name: str) -> CountedPrograms:
    """Those of all searches for the model, as a planner's searches share them."""
    return programs_of(captured(name), Layout.parse(f"tensor={WAYS[name]}"))


@cache
def found(name: str, ways: int) -> Placement:
    return find_place(captured(name), Layout.parse(f"tensor={ways}"), programs=programs(name))


def program(name: str, ways: int, place: dict[str, str]) -> Program:
    return partition(plan(copied(captured(name)), Layout.parse(f"tensor={ways}"), place))


def sent(made: Program) -> int:
    """Bytes that each rank sends over `tensor` in a step."""
    return sum(r.nbytes for r in records(made) if "tensor" in r.axes)


def parts(name: str, ways: int) -> tuple[dict[str, str], dict[str, str]]:
    """The found entries for parameters, and those for outputs of modules."""
    outputs = {p for p, text in found(name, ways).place.items() if text == "-, tensor, -"}
    outputs -= {p for p in outputs if p.endswith(("weight", "bias"))}
    place = found(name, ways).place
    return {p: t for p, t in place.items() if p not in outputs}, {p: place[p] for p in outputs}


@pytest.mark.parametrize(("name", "ways"), CASES)
def test_weights_move_no_more_bytes_than_megatron(name: str, ways: int) -> None:
    weights, _ = parts(name, ways)
    by_hand = sent(program(name, ways, dict(MODELS[name].place)))
    assert 0 < sent(program(name, ways, weights)) <= by_hand


@pytest.mark.parametrize(("name", "ways"), CASES)
def test_sequence_parallelism_moves_as_few_bytes_as_megatron(name: str, ways: int) -> None:
    """Megatron's sequence parallelism splits the same outputs. It always splits the embedding; one that
    stays whole since that takes less time sums a gradient over tokens: 3 % more here, for mamba."""
    weights, outputs = parts(name, ways)
    if name != "vit":  # 17 tokens do not divide
        assert outputs
    by_hand = sent(program(name, ways, {**MODELS[name].place, **outputs}))
    assert sent(program(name, ways, {**weights, **outputs})) <= 1.04 * by_hand


@pytest.mark.parametrize(("name", "ways"), CASES)
def test_no_more_time_than_megatron(name: str, ways: int) -> None:
    layout = Layout.parse(f"tensor={ways}")
    by_hand = cost_of(captured(name), layout, MODELS[name].place)
    made = found(name, ways)
    assert made.seconds <= WORTH * by_hand.seconds
    assert made.seconds < made.whole_seconds


def test_no_more_time_than_the_place_of_llamas_example() -> None:
    layout = Layout.parse("tensor=2")
    by_hand = cost_of(captured("llama"), layout, example("llama").PLACE)
    assert found("llama", 2).seconds <= WORTH * by_hand.seconds


def test_an_example_without_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search as in a user's run: the same numbers, in no more time than with the place of the example."""
    made, one = example("gpt"), []
    model = made.GPT(128, 3, 4, 0.1)
    batch = torch.randint(256, (2, 8, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    seen = Subject(made.train_step, model, optimizer, tuple(batch), steps=1)

    def searched(*args: Any, **rest: Any) -> Placement:
        one.append(find_place(*args, **rest))
        return one[-1]

    split_tokens(monkeypatch)
    monkeypatch.setattr(placement, "find_place", searched)
    layout = Layout.parse("data=2 tensor=2")
    assert_same_numbers(seen, layout)
    by_hand = cost_of(seen.captured, layout, made.PLACE)
    assert one[0].seconds <= WORTH * by_hand.seconds


def example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def split_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs."""
    monkeypatch.setattr(verdict, "found_seeds", partial(found_seeds, on_processors=False))


def assert_same_numbers(seen: Subject, layout: Layout) -> None:
    made = seen.verdict(layout)
    assert made.ok and made.max_error < 1e-9, str(made)


def share_programs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A search under any words counts the programs of `found`."""
    monkeypatch.setattr(placement, "find_place", partial(find_place, programs=programs(name)))


@pytest.mark.parametrize("name", MODELS)
def test_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens split as on GPUs, where they divide."""
    share_programs(monkeypatch, name)
    split_tokens(monkeypatch)
    assert_same_numbers(subject(name), Layout.parse(f"data=2 tensor={WAYS[name]}"))


def test_processors_keep_tokens_whole() -> None:
    """There a meeting of ranks costs more than the norms that split tokens save."""
    layout, outputs = Layout.parse("tensor=2"), parts("llama", 2)[1]
    assert outputs
    seeds = partial(found_seeds, captured("llama"), layout, {}, programs=programs("llama"))
    here = seeds()
    assert here == seeds(on_processors=True)
    assert not outputs.keys() & here["found"].keys() and here["found"]
    gpus = seeds(on_processors=False)
    assert outputs.keys() <= gpus["found"].keys()


def test_same_numbers_in_micro_batches_and_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of samples and tokens are cut in time and over `tensor` at once."""
    share_programs(monkeypatch, "bert")
    assert_same_numbers(subject("bert"), Layout.parse("pipe=2 tensor=2 micro=2"))


def test_words_name_parameters_by_pattern() -> None:
    words = found("llama", 2).words
    assert words[0] == (
        "attention: heads over tensor (model.layers.*.self_attn.q_proj.weight, "
        "model.layers.*.self_attn.k_proj.weight, model.layers.*.self_attn.v_proj.weight by rows; "
        "model.layers.*.self_attn.o_proj.weight by columns): one all-reduce a layer in the forward, "
        "one all-reduce a layer in the backward"
    )
    assert words[1].startswith(
        "feed-forward: hidden features over tensor (model.layers.*.mlp.gate_proj"
    )


def test_explain_says_what_was_found() -> None:
    made = found("llama", 2)
    graph, layout = copied(captured("llama")), Layout.parse("tensor=2")
    text = explain(partition(plan(graph, layout, found=made.place, words=made.words)))
    assert f"found, for lack of a place:\n  {made.words[0]}\n" in text
    assert "found" not in explain(program("llama", 2, dict(MODELS["llama"].place)))


def newly_captured(num_layers: int) -> Captured:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(num_layers)]
    model = nn.Sequential(nn.Embedding(64, 32), *layers, nn.Linear(32, 64))

    def train_step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return capture(train_step, model, optimizer, (torch.randint(64, (4, 8)),))


deep = cache(newly_captured)


@cache
def found_in_five() -> Placement:
    return find_place(deep(5), Layout.parse("tensor=2"))


def test_equal_layers_count_once() -> None:
    """The counted step has the same size, and the same programs are counted, for 8 and for 10 layers."""
    few, many = deep(8), deep(10)
    assert len(reduced(few).captured.graph.nodes) == len(reduced(many).captured.graph.nodes)
    layout = Layout.parse("tensor=2")
    one, other = find_place(few, layout), find_place(many, layout)
    assert one.num_counted == other.num_counted
    assert {p for p in other.place if "*" in p}
    covered = [n for n, kind in many.kinds.items() if kind == "parameter" and "linear1" in n]
    made = plan(copied(many), layout, found=other.place)
    assert all(made.compute[n].axes == {"tensor"} for n in covered)


@pytest.mark.parametrize("keeps_all", [False, True])
def test_two_layers_that_stand_for_eight_count_as_eight(keeps_all: bool) -> None:
    """So a plan that composes a deep model of a short one finds the deep one's placement."""

    def counted(captured: Captured) -> Counter[str]:
        nodes = reduced(captured, keeps_all=keeps_all).captured.graph.nodes
        found: Counter[str] = Counter()
        for node in nodes:
            if node.op == "call_function":
                found[str(node.target)] += node.meta[TIMES]
        return found

    short, whole = newly_captured(2), deep(8)
    assert counted(short) != counted(whole)
    # Layers 1 and 2 of the sequence, behind the embedding.
    mark_depth(short, lambda name: 7 if name.startswith("2.") or name == "2" else 1)
    assert counted(short) == counted(whole)


def test_weights_that_stand_for_many_cost_as_many() -> None:
    """Sums of gradients and the update, which splits of the weights make shorter; and the state's bytes."""
    short, whole = newly_captured(2), deep(8)
    mark_depth(short, lambda name: 7 if name.startswith("2.") or name == "2" else 1)
    layout = Layout.parse("data=16 tensor=2")
    one, other = find_place(short, layout), find_place(whole, layout)
    assert one.words == other.words
    for what in ("seconds", "whole_seconds", "sent_nbytes", "memory_nbytes"):
        assert getattr(one, what) == pytest.approx(getattr(other, what), rel=1e-3), what


def test_members_stand_for_every_parameter() -> None:
    many = deep(8)
    members = [m for names in reduced(many).members.values() for m in names]
    assert sorted(members) == sorted(n for n, kind in many.kinds.items() if kind == "parameter")


def test_a_step_of_two_updates_is_placed() -> None:
    """As two epochs of PPO: the second forward reads weights that the first update has made."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    model = nn.Sequential(model, nn.Linear(64, 8))

    def train_step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return loss.detach()

    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x = torch.randn(4, 64, dtype=torch.float32)
    step = tutti.distribute(train_step, model, optimizer, "tensor=2")
    compute = step.program_of((x,)).plan.compute
    assert str(compute["0.0.weight"]) == "256@tensor, 64"
    assert str(compute["0.2.weight"]) == "64, 256@tensor"
    assert tutti.verify(train_step, model, optimizer, (x,), "tensor=2").ok


def test_two_captures_give_one_placement() -> None:
    assert find_place(newly_captured(5), Layout.parse("tensor=2")) == found_in_five()


def test_the_user_has_the_word() -> None:
    given = {"*.q_proj.weight": "tensor, -"}
    layout = Layout.parse("tensor=2")
    assert find_place(captured("llama"), layout, given=given) == Placement()
    made = find_place(captured("llama"), layout, given=given, axes=("tensor",))
    assert "model.layers.*.mlp.up_proj.weight" in made.place
    assert not any("q_proj" in pattern for pattern in made.place)


def test_a_vocabulary_that_does_not_divide_is_no_reason_to_split_every_width() -> None:
    """Logits that nothing else splits, as those of GPT-2's 50,257 tokens, are split by tokens."""
    sizes = {"vocab_size": 50 * VOCABULARY + 1, "n_embd": 256, "n_positions": 64}
    model = replace(MODELS["gpt2"], sizes={**MODELS["gpt2"].sizes, **sizes})
    batch = {name: x.repeat(1, 4) for name, x in texts().items()}
    one = capture(train_step, *model.build(), (batch,))
    layout = Layout.parse("tensor=4")
    made = find_place(one, layout)
    by_hand = {p: text for p, text in model.place.items() if "wte" not in p}
    computes = [plan(copied(one), layout, found=place).compute for place in (made.place, by_hand)]
    layers = [n for n in computes[0] if n.startswith("transformer.h.") and ".ln_" not in n]
    assert [str(computes[0][n]) for n in layers] == [str(computes[1][n]) for n in layers]
    assert made.place["transformer.ln_f"] == "-, tensor, -"
    tokens = {p: text for p, text in made.place.items() if text == "-, tensor, -"}
    assert made.seconds <= WORTH * cost_of(one, layout, by_hand | tokens).seconds


def test_memory_decides_where_time_does_not() -> None:
    """Without its last split a placement needs more memory; a bound between both takes that split."""
    layout = Layout.parse("tensor=2")
    free = found("llama", 2)
    assert "model.embed_tokens.weight" not in free.place
    bound = free.memory_nbytes - 1000
    tight = find_place(captured("llama"), layout, memory_nbytes=bound, programs=programs("llama"))
    assert tight.place["model.embed_tokens.weight"] == "tensor, -"
    assert tight.memory_nbytes < bound


def test_nothing_to_split_is_said() -> None:
    model = nn.Linear(7, 5)

    def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    made = find_place(
        capture(train_step, model, None, (torch.ones(3, 7),)), Layout.parse("tensor=2")
    )
    assert made.place == {}
    assert made.words == (
        "nothing over tensor: no dim of a parameter divides by 2, so its ranks do the same work",
    )


def test_a_layout_without_the_axis_searches_nothing() -> None:
    assert find_place(captured("llama"), Layout.parse("data=2")) == Placement()
    assert texts()["input_ids"].shape[0] % 2 == 0


def test_between_hosts_bytes_take_the_adapters_time() -> None:
    near, far = (Yardstick.of(Layout.parse(f"data={n} tensor=2"), None) for n in (4, 8))
    call = CollectiveCall(NO_NODE, "all_reduce", 1_000_000, ("data",))
    inside, between = near.cluster.topology.inside, near.cluster.topology.between
    ratio = inside.bandwidth.value * inside.efficiency.value
    ratio /= between.bandwidth.value * between.efficiency.value
    assert ratio > 5
    assert far.collective(call) / near.collective(call) == pytest.approx(ratio * (7 / 8) / (3 / 4))


@pytest.mark.parametrize(
    ("words", "waited"), [("micro=2", 1.0), ("", 0.0), ("micro=2 zero=2", 0.0)]
)
def test_sums_of_gradients_are_waited_for_after_micro_batches(words: str, waited: float) -> None:
    """Otherwise they go beside the backward, as far as it lasts."""
    layout = Layout.parse(f"data=16 tensor=2 {words}")
    costing = Costing(captured("llama"), programs("llama"), layout, Yardstick.of(layout, None))
    local = dict.fromkeys(costing.weights, 1000000000.0)
    axes = dict.fromkeys(local, ("data",))
    whole = costing._summing(local, axes, 0.0) / (layout.micro if layout.zero else 1)
    beside = costing._summing(local, axes, 1e6 * whole)
    assert beside / whole == pytest.approx(waited, abs=0.25)


def test_zero_shards_the_weights_of_experts_over_fewer_axes() -> None:
    layout = Layout.parse("data=4 expert=2 zero=1")
    costing = Costing(captured("llama"), programs("llama"), layout, Yardstick.of(layout, None))
    name, *others = costing.weights
    local = dict.fromkeys(costing.weights, 8e9)
    both = dict.fromkeys(costing.weights, ("expert", "data"))
    parts = costing._parts(local, both | {name: ("data",)})
    assert parts == {name: 2e9} | dict.fromkeys(others, 1e9)
    kept = sum((1 + costing._slots(m)) * n for m, n in parts.items())
    assert costing._state_nbytes(local, parts) == pytest.approx(sum(local.values()) + kept)
    over_both = costing._summing(local, both, 0.0)
    over_data = costing._summing(local, dict.fromkeys(local, ("data",)), 0.0)
    assert over_both / over_data == pytest.approx((7 / 8) / (3 / 4), rel=0.01)
