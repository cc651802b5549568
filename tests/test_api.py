"""`distribute` in one process and on two ranks: what a step takes, returns, shares and captures again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import runs
import tutti
import zoo
from ranks import Ranks
from wide import widened


def returning_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> dict[str, Any]:
    logits = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"])
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss, "extra": (norm, logits.detach()), "name": "a constant"}


def make() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    _, model, optimizer, batches = zoo.CASES["sgd"].build()
    assert optimizer is not None
    ((x, y),) = widened(model, batches[0])
    return model, optimizer, {"x": x, "y": y.clamp(min=0)}


def returned(layout: str) -> dict[str, Any]:
    """What two steps return, as plain lists."""
    model, optimizer, batch = make()
    step = tutti.distribute(returning_step, model, optimizer, layout)
    step(batch)
    found = step(batch)
    norm, logits = found["extra"]
    return {"loss": found["loss"].item(), "norm": norm.item(), "logits": logits.tolist()} | {
        "name": found["name"]
    }


def test_returned_values_keep_their_structure_and_are_global(ranks: Ranks) -> None:
    model, optimizer, batch = make()
    returning_step(model, optimizer, batch)
    plain = returning_step(model, optimizer, batch)
    for found in (returned(""), *ranks.run(returned, "data=2 zero=3", n=2)):
        assert found["name"] == "a constant"
        assert found["loss"] == pytest.approx(plain["loss"].item(), rel=1e-10)
        assert found["norm"] == pytest.approx(plain["extra"][0].item(), rel=1e-10)
        torch.testing.assert_close(
            torch.tensor(found["logits"], dtype=torch.float64),
            plain["extra"][1],
            rtol=1e-10,
            atol=1e-12,
        )


def class_step(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    return model(x).argmax(-1)


def training_and_evaluation() -> tuple[list[float], list[int], bool]:
    """A training step, an evaluation on the same model, another; and a smaller last batch."""
    model, optimizer, batch = make()
    step = tutti.distribute(returning_step, model, optimizer, "data=2 zero=3")
    evaluate = tutti.distribute(class_step, model, layout="data=2 zero=3")
    losses, classes = [], []
    for rows in (8, 8, 6, 8):
        part = {k: v[:rows] for k, v in batch.items()}
        losses.append(step(part)["loss"].item())
        classes += evaluate(part["x"]).tolist()
    return losses, classes, all(isinstance(p, DTensor) for p in model.parameters())


def test_steps_on_one_model_share_its_shards(ranks: Ranks) -> None:
    model, optimizer, batch = make()
    losses, classes = [], []
    for rows in (8, 8, 6, 8):
        part = {k: v[:rows] for k, v in batch.items()}
        losses.append(returning_step(model, optimizer, part)["loss"].item())
        with torch.no_grad():
            classes += class_step(model, part["x"]).tolist()
    for found, found_classes, sharded in ranks.run(training_and_evaluation, n=2):
        runs.assert_same_losses(found, losses)
        assert found_classes == classes
        assert sharded


def sharded_inputs() -> tuple[list[float], list[float]]:
    """The losses with plain global inputs, and with DTensors of which each rank made its part."""
    from torch.distributed.device_mesh import init_device_mesh

    found = []
    for as_dtensor in (False, True):
        play = runs.prepare("sgd", "data=2")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        losses = []
        for k in range(3):
            batch: Any = play.batches[k % 2]
            if as_dtensor:
                mine = [x.chunk(2)[mesh.get_local_rank()] for x in batch]
                batch = [DTensor.from_local(x, mesh, [Shard(0)]) for x in mine]
            losses.append(play.step(*batch).item())
        found.append(losses)
    return found[0], found[1]


def test_inputs_may_be_sharded_already(ranks: Ranks) -> None:
    for plain, sharded in ranks.run(sharded_inputs, n=2):
        assert plain == sharded


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from tutti.modes import plain

    calls: list[int] = []
    capture = plain.capture

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return capture(*args, **options)

    monkeypatch.setattr(plain, "capture", counted)
    return calls


def test_what_captures_again_and_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_captures(monkeypatch)
    train_step, model, optimizer, batches = zoo.CASES["sgd"].build()
    assert optimizer is not None
    step = tutti.distribute(train_step, model, optimizer, "")
    x, y = batches[0]
    step(x, y)
    step(*batches[1])
    assert len(calls) == 1
    optimizer.param_groups[0]["lr"] = 0.01  # an input of the graph
    step(x, y)
    assert len(calls) == 1
    step(x[:4], y[:4])  # another shape
    assert len(calls) == 2
    step(x, y)  # seen before
    assert len(calls) == 2
    optimizer.param_groups[0]["nesterov"] = False  # a constant of the trace
    step(x, y)
    assert len(calls) == 3


def test_a_learning_rate_of_zero_changes_nothing() -> None:
    train_step, model, optimizer, batches = zoo.CASES["adamw_loop"].build()
    assert optimizer is not None
    step = tutti.distribute(train_step, model, optimizer, "")
    step(*batches[0])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    step(*batches[1])
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.param_groups[0]["lr"] = 1e-3
    step(*batches[1])
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_returned_weight_is_a_plain_tensor_and_gradients_stay_on() -> None:
    def returning(model: nn.Linear, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return model.weight, model.bias

    model = nn.Linear(2, 2)
    step = tutti.distribute(returning, model, torch.optim.SGD([model.weight], lr=0.1), "")
    for found, held in zip(step(torch.randn(3, 2)), model.parameters(), strict=True):
        assert type(found) is Tensor and not found.requires_grad
        assert torch.equal(found, held) and held.requires_grad
    assert torch.is_grad_enabled()
    with torch.no_grad():
        step(torch.randn(3, 2))
        assert not torch.is_grad_enabled()


def test_the_seed_chooses_the_masks() -> None:
    train_step, model, optimizer, batches = zoo.CASES["gpt_tied"].build()
    losses = {}
    for seed in (0, 0, 1):
        train_step, model, optimizer, batches = zoo.CASES["gpt_tied"].build()
        step = tutti.distribute(train_step, model, optimizer, "", seed=seed)
        losses.setdefault(seed, []).append(step(*batches[0]).item())
    assert losses[0][0] == losses[0][1] != losses[1][0]


def test_looking_at_a_step_leaves_the_users_random_numbers_alone() -> None:
    play = runs.prepare("gpt_tied")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    play.losses(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_several_optimizers_each_with_its_state(tmp_path: Path) -> None:
    def build() -> tuple[tutti.Step, list[torch.optim.Optimizer], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        both = [
            torch.optim.AdamW(model[0].parameters(), lr=1e-2),
            torch.optim.SGD(model[2].parameters(), lr=1e-2, momentum=0.9),
        ]
        return tutti.distribute(two_step, model, both, ""), both, torch.randn(8, 4)

    def two_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], x: Tensor) -> Tensor:
        loss = (model(x) - x).square().mean()
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()
        return loss

    step, _, x = build()
    expected = [step(x).item() for _ in range(4)]
    first, _, x = build()
    first(x), first(x)
    first.save(tmp_path / "saved")
    second, _, x = build()
    second.load(tmp_path / "saved")
    runs.assert_same_losses([second(x).item() for _ in range(2)], expected[2:])
    assert {"optim.0.weight.exp_avg", "optim.2.weight.momentum_buffer"} <= set(second.state_dict())


@pytest.mark.parametrize("given", [None, 3, "f", "model", "loss"])
def test_what_is_no_training_step_is_refused_at_once(given: Any) -> None:
    model, optimizer, batch = make()
    step: Any = {"model": model, "loss": nn.Linear(2, 2)}.get(given, given)
    for call in (
        lambda: tutti.distribute(step, model, optimizer),
        lambda: tutti.verify(step, model, optimizer, (batch,), ""),
    ):
        with pytest.raises(tutti.TuttiError, match="the training step"):
            call()


def test_a_step_without_a_place_for_the_optimizer_is_refused() -> None:
    model, optimizer, _ = make()
    with pytest.raises(
        tutti.TuttiError, match=r"too many positional(.|\n)*train_step\(model, optimizer, x, y\)"
    ):
        tutti.distribute(lambda model: model, model, optimizer)


def test_a_step_without_its_optimizer_has_the_fix() -> None:
    model, _, batch = make()
    step = tutti.distribute(returning_step, model)
    with pytest.raises(
        tutti.CaptureError, match="with optimizer=None the step is called without one"
    ):
        step(batch)


@pytest.mark.parametrize("given", [None, 3])
def test_a_batch_that_is_no_sequence_is_refused(given: Any) -> None:
    model, optimizer, _ = make()
    with pytest.raises(tutti.CaptureError, match="where the arguments of a call belong"):
        tutti.verify(returning_step, model, optimizer, given, "")
