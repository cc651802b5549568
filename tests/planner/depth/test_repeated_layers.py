"""Repeated layers: which are equal, and a model that is shorter for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tutti.planner.depth.repeated_layers import Run, ShortUnits, runs_of, shortened


class Layer(nn.Module):
    def __init__(self, width: int, kind: str, idx: int) -> None:
        super().__init__()
        self.kind, self.layer_idx = kind, idx
        self.linear = nn.Linear(width, width)


class Stack(nn.Module):
    def __init__(self, kinds: str, widths: dict[str, int] | None = None) -> None:
        super().__init__()
        widths = widths or {}
        self.head = nn.Linear(4, 4)
        self.layers = nn.ModuleList(
            Layer(widths.get(kind, 4), kind, i) for i, kind in enumerate(kinds)
        )


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("aaaaa", [(0, 1, 5)]),
        ("aaaa", []),
        ("aaabbbbbbb", [(3, 1, 7)]),
        ("aaaaabbbbb", [(0, 1, 5), (5, 1, 5)]),
        ("ababababab", [(0, 2, 5)]),
        ("aabaabaabaabaab", [(0, 3, 5)]),
        ("abcde", []),
    ],
)
def test_runs(kinds: str, runs: list[tuple[int, int, int]]) -> None:
    assert [(r.start, r.unit, r.repeats) for r in runs_of(Stack(kinds))] == runs


def test_a_container_may_have_none_for_a_layer() -> None:
    """As `x_transformers` has it: norms before and after a block, some of which it lacks."""
    norms = [None, None, None, None, None, *(nn.LayerNorm(4) for _ in range(5))]
    assert runs_of(nn.ModuleList(norms)) == (Run("", 5, 1, 5),)  # type: ignore[arg-type]


def test_layers_of_other_sizes_differ() -> None:
    assert runs_of(Stack("ababa", {"b": 8})) == ()


def test_hugging_faces_layers_are_equal_whatever_their_number() -> None:
    llama = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    with torch.device("meta"):
        assert runs_of(LlamaForCausalLM(llama)) == (Run("model.layers", 0, 1, 6),)
        gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=7, n_head=2, vocab_size=64))
    assert runs_of(gpt2) == (Run("transformer.h", 0, 1, 7),)


def test_a_short_model_is_whole_again() -> None:
    model = Stack("aaaaaabbbbbb")
    optimizer = torch.optim.SGD(
        [{"params": model.head.parameters()}, {"params": model.layers.parameters(), "lr": 2.0}],
        lr=1.0,
    )
    before = list(model.layers), [list(g["params"]) for g in optimizer.param_groups]
    repeats = dict.fromkeys(runs_of(model), 2)
    with pytest.raises(RuntimeError, match="inside"), shortened(model, optimizer, repeats):
        assert [x.kind for x in model.layers] == list("aabb")  # type: ignore[union-attr]
        assert [len(g["params"]) for g in optimizer.param_groups] == [2, 8]
        assert optimizer.param_groups[1]["lr"] == 2.0
        raise RuntimeError("inside")
    assert (list(model.layers), [list(g["params"]) for g in optimizer.param_groups]) == before


def test_units_of_several_runs_in_one_container() -> None:
    runs = runs_of(Stack("caaaaabbbbb"))
    units = ShortUnits(runs, dict.fromkeys(runs, 2))  # short: c a a b b
    found = [units.of(f"layers.{i}.linear.weight") for i in range(6)]
    assert found == [None, (0, 0), (0, 1), (1, 0), (1, 1), None]
    assert units.of("head.weight") is None


def test_the_last_unit_stands_for_those_left_out() -> None:
    runs = runs_of(Stack("caaaaabbbbb"))
    units = ShortUnits(runs, dict.fromkeys(runs, 2))
    found = [units.stands_for(f"layers.{i}.linear.weight") for i in range(6)]
    assert found == [1, 1, 4, 1, 4, 1]
    assert sum(found[:5]) == 11
