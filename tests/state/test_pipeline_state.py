"""State under a pipeline: each place keeps its own, and all of it together is that of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import runs
import tutti
import zoo
import zoo_models
from captured_once import captured_once
from ranks import After, Ranks
from tutti.state.residence import is_here
from wide import widened

CASE, BEFORE, AFTER = "adamw_foreach", 3, 2
PROGRAM = CASE, True  # as `runs.train` names it
PIPE = "pipe=2 micro=2"


def together(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of all ranks; where two have the same tensor, it is the same."""
    every: dict[str, Any] = {}
    for state in states:
        for name, x in state.items():
            np.testing.assert_array_equal(every.setdefault(name, x), x, err_msg=name)
    return every


def uninterrupted(ranks: Ranks, name: str) -> After:
    """The run on one device, and ranks that have its capture."""
    return ranks.after(runs.on_one_device, name, BEFORE + AFTER)


def check_goes_on(one: After, found: list[Any]) -> None:
    losses, state = one.result
    for here in found:
        runs.assert_same_losses(here[0], losses[BEFORE:])
        runs.assert_same_losses(here[1]["losses"], losses[:BEFORE])
    runs.assert_same_state(together([here[2] for here in found]), state)


@pytest.mark.parametrize("layout", [PIPE, "pipe=2 micro=4 schedule=interleaved(1)"])
def test_saved_under_a_pipeline_resumes_anywhere(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    path, one = str(tmp_path / "saved"), uninterrupted(ranks, CASE)
    one.run(runs.train_and_save, CASE, layout, BEFORE, path, n=2)
    check_goes_on(one, [runs.resume(CASE, "", AFTER, path)])
    for other in ("data=2 zero=3", "tensor=2", PIPE):
        check_goes_on(one, one.run(runs.resume, CASE, other, AFTER, path, n=2))


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2"])
def test_saved_elsewhere_resumes_under_a_pipeline(
    ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    path, one = str(tmp_path / "saved"), uninterrupted(ranks, CASE)
    one.run(runs.train_and_save, CASE, layout, BEFORE, path, n=2)
    check_goes_on(one, one.run(runs.resume, CASE, PIPE, AFTER, path, n=2))


def test_tied_and_sharded_state_of_stages(ranks: Ranks, tmp_path: Path) -> None:
    """Dropout, an embedding that two stages read, shards over `data` at each place."""
    path, layout = str(tmp_path / "saved"), "pipe=2 data=2 zero=3 micro=2"
    one = uninterrupted(ranks, "gpt_tied")
    one.run(runs.train_and_save, "gpt_tied", layout, BEFORE, path, n=4)
    check_goes_on(one, [runs.resume("gpt_tied", "", AFTER, path)])


def kinds_of_state() -> dict[str, Any]:
    """What the step and the model say of the state, on one rank."""
    play = runs.prepare(CASE, PIPE)
    shapes = {n: tuple(p.shape) for n, p in play.step.model.named_parameters()}
    num_elements = sum(p.numel() for p in play.step.model.parameters())
    play.losses(1, PROGRAM)
    state, model = play.step.state_dict(), play.step.model
    assert all(is_here(x) for x in state.values())
    # What plain PyTorch code looks at is as before.
    assert {n: tuple(x.shape) for n, x in model.state_dict().items()} == shapes
    assert sum(p.numel() for p in model.parameters()) == num_elements
    assert all(p.grad is None for p in model.parameters())
    assert all(repr(p) and p.requires_grad for p in model.parameters())
    elsewhere = [x for x in model.parameters() if not is_here(x)]
    assert elsewhere and all(isinstance(x, DTensor) and not x.to_local().numel() for x in elsewhere)
    return {n: tuple(x.shape) for n, x in state.items()}


def test_state_dict_holds_what_this_rank_keeps(ranks: Ranks) -> None:
    first, second = uninterrupted(ranks, CASE).run(kinds_of_state, n=2)
    play = runs.prepare(CASE)
    play.losses(1, PROGRAM)
    every = {n: tuple(x.shape) for n, x in play.step.state_dict().items()}
    assert first | second == every
    assert set(first) & set(second) == {"num_steps"}
    for found in (first, second):  # slots lie where their parameter does
        names = {n.removeprefix("optim.").rpartition(".")[0] for n in found if "optim." in n}
        assert names == {n for n in found if "optim." not in n} - {"num_steps"}


def exchange(path: str) -> tuple[list[float], list[float]]:
    """Take whole tensors over, then what the step itself gave; the losses after each."""
    play = runs.prepare(CASE, PIPE)
    play.losses(1, PROGRAM)
    play.step.load_state_dict(torch.load(path, weights_only=True))
    between = {n: x.clone() for n, x in play.step.state_dict().items()}
    losses = play.losses(AFTER, PROGRAM)
    play.step.load_state_dict(between)
    again = play.losses(AFTER, PROGRAM)
    mine = next(n for n in between if n.endswith("weight"))
    for state in (
        {n: x for n, x in between.items() if n != mine},
        {**between, "no": between[mine]},
    ):
        with pytest.raises(tutti.CheckpointError, match="another model"):
            play.step.load_state_dict(state)
    return losses, again


def test_whole_tensors_and_own_parts_load(ranks: Ranks, tmp_path: Path) -> None:
    play = runs.prepare(CASE)
    play.losses(BEFORE, PROGRAM)
    torch.save(play.step.state_dict(), tmp_path / "state.pt")
    one = uninterrupted(ranks, CASE)
    expected = one.result[0][BEFORE:]
    for losses, again in one.run(exchange, str(tmp_path / "state.pt"), n=2):
        runs.assert_same_losses(losses, expected)
        runs.assert_same_losses(again, expected)


def through_safetensors(path: str) -> dict[str, Any]:
    """Train, write the model, train on, read it again: the parameters that lie here."""
    play = runs.prepare(CASE, PIPE)
    play.losses(BEFORE, PROGRAM)
    play.step.save(path)
    play.losses(1, PROGRAM)
    play.step.load(path)
    return play.whole_state()


def test_safetensors_come_from_all_places_and_go_back(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    one = uninterrupted(ranks, CASE)
    every = together_parameters(one.run(through_safetensors, str(path), n=2))
    written = load_file(path)
    expected = runs.on_one_device(CASE, BEFORE)[1]
    assert set(written) == set(every)
    for name, x in written.items():
        np.testing.assert_array_equal(every[name], x.numpy())
    runs.assert_same_state(
        {n: x.numpy() for n, x in written.items()}, {n: expected[n] for n in every}
    )


def together_parameters(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters alone."""
    return {n: x for s in states for n, x in s.items() if "optim." not in n and n != "num_steps"}


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss without a backward."""
    with torch.no_grad():
        return F.cross_entropy(model(x), y, ignore_index=-100)


def two_steps(layout: str, first: str, tied: bool) -> tuple[list[float], list[list[int]]]:
    """Train and evaluate in turn, one of them first; the losses, and what lies here each time."""
    if tied:
        train_step, model, optimizer, batches = zoo.build(
            lambda: zoo_models.GPT(tied=True, num_layers=1)
        )
        measure: Any = zoo.CASES["eval"].build()[0]
    else:
        train_step, model, optimizer, batches = zoo.CASES[CASE].build()
        measure = evaluate
    batches = widened(model, *batches)
    train = tutti.distribute(train_step, model, optimizer, layout)
    test = tutti.distribute(measure, model, None, layout)
    found, lies = [], []
    for k in range(3):
        order = (train, test) if first == "train" else (test, train)
        for step in order:
            with captured_once(("two steps", tied, step is train)):
                found.append(step(*batches[k % 2]).item())
            lies.append([i for i, p in enumerate(model.parameters()) if is_here(p)])
    return found, lies


@pytest.mark.parametrize(
    ("first", "tied"), [("train", False), ("eval", False), ("train", True), ("eval", True)]
)
def test_two_steps_share_one_residence(ranks: Ranks, first: str, tied: bool) -> None:
    one = ranks.after(two_steps, "", first, tied)
    expected, _ = one.result
    for losses, lies in one.run(two_steps, PIPE, first, tied, n=2):
        runs.assert_same_losses(losses, expected)
        assert all(here == lies[0] for here in lies)


def deferred(layout: str) -> tuple[list[float], dict[str, Any]]:
    """Losses and state of an MLP built on the meta device."""
    with torch.device("meta"):
        _, model, _, _ = zoo.CASES[CASE].build()
    train_step, _, _, batches = zoo.CASES[CASE].build()
    batches = widened(model, *batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    step = tutti.distribute(train_step, model, optimizer, layout, seed=3)
    with captured_once("deferred"):
        losses = [float(step(*batch)) for batch in batches[:2]]
    return losses, {n: runs.whole(x).numpy().copy() for n, x in step.state_dict().items()}


def test_a_deferred_model_starts_the_same(ranks: Ranks) -> None:
    one = ranks.after(deferred, "")
    losses, state = one.result
    found = one.run(deferred, PIPE, n=2)
    for here, _ in found:
        runs.assert_same_losses(here, losses)
    runs.assert_same_state(together([s for _, s in found]), state)
