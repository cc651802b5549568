"""The zoo's own promises: each case runs, learns, clips, and counts its targets unevenly."""

from __future__ import annotations

import time
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo_steps import IGNORED, MAX_NORM

NAMES = tuple(zoo.CASES)
EVERY = pytest.mark.parametrize("name", NAMES)


@EVERY
def test_two_steps_run_and_change_the_loss(name: str) -> None:
    begin = time.perf_counter()
    losses = zoo.play(zoo.CASES[name])
    assert time.perf_counter() - begin < 10.0  # a second here; much slack for a busy machine
    assert torch.isfinite(torch.stack(losses)).all()
    assert losses[0].ndim == 0 and losses[0] != losses[1]


@EVERY
def test_build_is_deterministic(name: str) -> None:
    (_, one, _, batches), (_, two, _, again) = (zoo.CASES[name].build() for _ in range(2))
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(batches, again, rtol=0, atol=0)
    assert len(batches) >= 2
    assert not torch.equal(batches[0][0], batches[1][0])


@EVERY
def test_repeating_one_batch_lowers_its_loss(name: str) -> None:
    step, model, optimizer, batches = zoo.CASES[name].build()
    if optimizer is None:
        pytest.skip("no optimizer")
    losses = [float(step(model, optimizer, *batches[0]).detach()) for _ in range(20)]
    assert sum(losses[-3:]) < sum(losses[:3])


@EVERY
def test_clipping_clips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[Tensor] = []
    clip = torch.nn.utils.clip_grad_norm_

    def recorded(*args: object, **options: object) -> Tensor:
        norms.append(clip(*args, **options))  # type: ignore[arg-type]
        return norms[-1]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    zoo.play(zoo.CASES[name], 4)
    assert len(norms) == (0 if name == "eval" else 4)
    assert all(norm > 2 * MAX_NORM for norm in norms)


@EVERY
def test_valid_targets_differ_between_the_halves_of_the_batch(name: str) -> None:
    for batch in zoo.CASES[name].build()[3]:
        assert all(len(part) % 8 == 0 for part in batch)
        counts = [(half != IGNORED).sum() for half in batch[-1].chunk(2)]
        assert counts[0] != counts[1]
        assert counts[0] > 0 and counts[1] > 0


def _spans(model: nn.Module, name: str, text: str) -> bool:
    """One entry per dim, and four ranks can split the dim that `tensor` names."""
    shape, entries = model.get_parameter(name).shape, text.split(", ")
    sizes = [size for size, entry in zip(shape, entries, strict=True) if entry == "tensor"]
    return len(sizes) == 1 and sizes[0] % 4 == 0


@EVERY
def test_placements_match_and_divide(name: str) -> None:
    case = zoo.CASES[name]
    model = case.build()[1]
    names = [parameter for parameter, _ in model.named_parameters()]
    for pattern, text in case.place.items():
        matches = [parameter for parameter in names if fnmatch(parameter, pattern)]
        assert matches, pattern
        assert all(_spans(model, match, text) for match in matches)


def test_groups_name_cases() -> None:
    groups = (*zoo.TRANSFORMERS, *zoo.OPTIMIZERS, *zoo.STEPS)
    assert set(groups) <= set(NAMES) and len(set(groups)) == len(groups)
    assert all(zoo.CASES[name].place for name in zoo.TRANSFORMERS)


def test_attention_variants() -> None:
    configs: list[Any] = [zoo.CASES[n].build()[1].config for n in ("llama", "llama_eager")]
    assert [config._attn_implementation for config in configs] == ["sdpa", "eager"]


def test_only_random_cases_draw_random_numbers() -> None:
    for case in zoo.CASES.values():
        step, model, optimizer, batches = case.build()
        before = torch.get_rng_state()
        step(*((model, optimizer) if optimizer else (model,)), *batches[0])
        assert torch.equal(before, torch.get_rng_state()) is not case.random, case.name
