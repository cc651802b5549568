"""Checkpoints: saved under one layout, resumed under another, as if the run had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import runs
import zoo
from ranks import After, Ranks

BEFORE, AFTER = 5, 5


def uninterrupted(ranks: Ranks, name: str) -> After:
    """The run on one device, and ranks that have its capture."""
    return ranks.after(runs.on_one_device, name, BEFORE + AFTER)


def check_goes_on(one: After, found: tuple[list[float], dict[str, Any], dict[str, Any]]) -> None:
    losses, state = one.result
    runs.assert_same_losses(found[0], losses[BEFORE:])
    runs.assert_same_losses(found[1]["losses"], losses[:BEFORE])
    runs.assert_same_state(found[2], state)


def test_sharded_state_resumes_under_other_layouts_and_on_one_device(
    ranks: Ranks, tmp_path: Path
) -> None:
    path, one = str(tmp_path / "saved"), uninterrupted(ranks, "llama")
    one.run(runs.train_and_save, "llama", "data=2 zero=3", BEFORE, path, n=2)
    for found in one.run(runs.resume, "llama", "tensor=2", AFTER, path, n=2):
        check_goes_on(one, found)
    check_goes_on(one, runs.resume("llama", "", AFTER, path))


def test_a_dim_split_by_two_axes_comes_back_whole(ranks: Ranks, tmp_path: Path) -> None:
    path, one = str(tmp_path / "saved"), uninterrupted(ranks, "gpt")
    one.run(runs.train_and_save, "gpt", "data=2 tensor=2 zero=3", BEFORE, path, n=4)
    check_goes_on(one, runs.resume("gpt", "", AFTER, path))
    for found in one.run(runs.resume, "gpt", "data=2 zero=2", AFTER, path, n=2):
        check_goes_on(one, found)


def test_dropout_goes_on_with_the_masks_of_an_uninterrupted_run(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Saved on one device, resumed on ranks; the weights are tied as well."""
    path, one = str(tmp_path / "saved"), uninterrupted(ranks, "gpt_tied")
    runs.train_and_save("gpt_tied", "", BEFORE, path)
    for found in one.run(runs.resume, "gpt_tied", "data=2 zero=3", AFTER, path, n=2):
        check_goes_on(one, found)


def test_parts_over_the_sequence_go_on_over_the_samples(ranks: Ranks, tmp_path: Path) -> None:
    path, one = str(tmp_path / "saved"), uninterrupted(ranks, "llama")
    one.run(runs.train_and_save, "llama", "seq=2 zero=3", BEFORE, path, n=2)
    for found in one.run(runs.resume, "llama", "data=2 zero=1", AFTER, path, n=2):
        check_goes_on(one, found)


def load_after_a_step(name: str, layout: str, path: str) -> list[float]:
    """As `resume`, but of a step that has run: its state is in shards already."""
    play = runs.prepare(name, layout)
    play.losses(1, (name, True))
    play.step.load(path)
    return play.losses(AFTER, (name, True))


def test_a_step_that_has_run_takes_a_checkpoint_over(ranks: Ranks, tmp_path: Path) -> None:
    path, one = str(tmp_path / "saved"), uninterrupted(ranks, "gpt")
    runs.train_and_save("gpt", "", BEFORE, path)
    for losses in one.run(load_after_a_step, "gpt", "data=2 zero=3", path, n=2):
        runs.assert_same_losses(losses, one.result[0][BEFORE:])


def kinds_of_state(layout: str) -> dict[str, tuple[bool, tuple[int, ...], tuple[int, ...], bool]]:
    """By name: whether it is a DTensor, its global and its local shape, whether it needs grad."""
    play = runs.prepare("llama", layout)
    play.losses(1, ("llama", True))
    found = {}
    for name, x in play.step.state_dict().items():
        local = x.to_local() if isinstance(x, DTensor) else x
        found[name] = (isinstance(x, DTensor), tuple(x.shape), tuple(local.shape), x.requires_grad)
    return found


def test_state_dict_holds_dtensors_by_name(ranks: Ranks) -> None:
    whole = runs.prepare("llama")
    shapes = {n: tuple(p.shape) for n, p in whole.step.model.named_parameters()}
    one = uninterrupted(ranks, "llama")
    for found in one.run(kinds_of_state, "data=2 zero=3", n=2):
        assert set(shapes) <= set(found) and "num_steps" in found
        for name, shape in shapes.items():
            halves = (shape[0] // 2, *shape[1:])
            for entry in (name, f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
                assert found[entry] == (True, shape, halves, False), entry


def exchange(layout: str, path: str) -> tuple[list[float], list[float]]:
    """Take over whole tensors, then what another step's `state_dict` gave; the losses of each."""
    state = torch.load(path, weights_only=True)
    one = runs.prepare("gpt", layout)
    program = "gpt", True
    one.losses(1, program)
    one.step.load_state_dict(state)
    between = {n: x.clone() for n, x in one.step.state_dict().items()}
    losses = one.losses(AFTER, program)
    one.step.load_state_dict(between)
    return losses, one.losses(AFTER, program)


def test_whole_tensors_and_dtensors_load(ranks: Ranks, tmp_path: Path) -> None:
    play = runs.prepare("gpt")
    play.losses(BEFORE, ("gpt", True))
    path = tmp_path / "state.pt"
    torch.save(play.step.state_dict(), path)
    one = uninterrupted(ranks, "gpt")
    expected = one.result[0][BEFORE:]
    for first, second in one.run(exchange, "data=2 zero=3", str(path), n=2):
        runs.assert_same_losses(first, expected)
        runs.assert_same_losses(second, expected)


def through_safetensors(given: str, written: str) -> dict[str, Any]:
    """Load one file, save it to another under zero=3; the whole parameters and buffers."""
    play = runs.prepare("gpt_tied", "data=2 zero=3")
    play.losses(1, ("gpt_tied", True))
    play.step.load(given)
    play.step.save(written)
    return play.whole_state()


def test_safetensors_go_both_ways_with_a_plain_model(ranks: Ranks, tmp_path: Path) -> None:
    _, plain, _, _ = zoo.CASES["gpt_tied"].build()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p))
    expected = {n: p.detach().numpy() for n, p in plain.named_parameters()}
    given, written = tmp_path / "given.safetensors", tmp_path / "written.safetensors"
    save_file({n: p.detach() for n, p in plain.named_parameters()}, given)
    one = uninterrupted(ranks, "gpt_tied")
    for state in one.run(through_safetensors, str(given), str(written), n=2):
        for name, x in expected.items():
            np.testing.assert_array_equal(state[name], x)
    _, fresh, _, _ = zoo.CASES["gpt_tied"].build()
    missing, unexpected = fresh.load_state_dict(load_file(written), strict=False)
    assert missing == ["head.weight"] and not unexpected  # tied: written once
    for name, p in fresh.named_parameters():
        np.testing.assert_array_equal(p.detach().numpy(), expected[name])


@pytest.mark.parametrize("name", ["resnet"])
def test_a_file_of_a_plain_state_dict_loads_with_its_buffers(name: str, tmp_path: Path) -> None:
    play = runs.prepare(name)
    play.losses(2)
    path = tmp_path / "plain.safetensors"
    play.step.save(path)
    again = runs.prepare(name)
    again.step.load(path)
    now = again.step.model.state_dict()
    for key, x in play.step.model.state_dict().items():
        torch.testing.assert_close(now[key], x, rtol=0, atol=0)
