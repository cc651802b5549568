"""The models are of the sizes that they are named after, and the same in every process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.models import CASES, Case, module_names, num_parameters
from tests.benchmarks.tiny import GPT, LLAMA, RESNET

SIZES = {
    "gpt-3.7M": 3.7e6,
    "gpt-29.5M": 29.5e6,
    "gpt-51M": 51.0e6,
    "llama-30M": 29.6e6,
    "resnet-11M": 11.2e6,
}


@pytest.mark.parametrize("name", CASES)
def test_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = CASES[name].make()
    assert round(num_parameters(model) / 1e5) == round(SIZES[name.removesuffix(" pipe")] / 1e5)


def test_the_parameters_of_a_gpt_in_closed_form() -> None:
    case = replace(GPT, depth=3)
    d = case.width
    block = 4 * (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d) + 4 * d
    expected = (2 * case.vocab + case.window) * d + case.depth * block + 2 * d
    assert num_parameters(case.model()) == expected


@pytest.mark.parametrize("case", [GPT, LLAMA, RESNET], ids=lambda c: c.name)
def test_weights_and_batches_are_functions_of_the_seed(case: Case) -> None:
    torch.manual_seed(17)
    first, second = case.model(), case.model()
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    one, again, other = case.batch(3, 2), case.batch(3, 2), case.batch(4, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])
    assert len(one[0]) == 2 * case.per_rank


@pytest.mark.parametrize("case", [GPT, LLAMA, RESNET], ids=lambda c: c.name)
def test_every_pattern_names_modules(case: Case) -> None:
    model = case.model()
    patterns = [*case.blocks, *case.columns, *case.rows, case.embedding, case.head]
    assert all(module_names(model, (pattern,)) for pattern in patterns if pattern)


def test_a_star_is_one_part_of_a_name() -> None:
    model = replace(GPT, depth=2).model()
    assert module_names(model, ("blocks.*",)) == ["blocks.0", "blocks.1"]
    assert module_names(model, ("*.1.q",)) == ["blocks.1.q"]
    assert module_names(model, ("q",)) == []
