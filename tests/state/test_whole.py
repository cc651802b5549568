"""Weights between steps, under every layout: evaluated, averaged, written, saved as on one device."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import swa_utils

import small_steps
import tutti
from captured_once import captured_once
from ranks import Ranks
from tutti.state.shards import StateShard

LAYOUTS = ["data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "tensor=2", "pipe=2"]
PLACE = {"up.weight": "tensor, -"}


class Tied(nn.Module):
    """Two layers between an embedding and a head that share their weight, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.up, self.norm, self.down = (
            nn.Linear(8, 16, False),
            nn.BatchNorm1d(16),
            nn.Linear(16, 8),
        )
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of tokens (n,)."""
        return self.head(self.down(F.gelu(self.norm(self.up(self.embedding(x))))))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        found = model(x)
    model.train()
    return found


def make(layout: str) -> tuple[tutti.Step, Any, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(16, (2, 8), generator=generator)) for _ in range(8)]
    step = tutti.distribute(train_step, model, optimizer, layout, place=PLACE)
    return step, model, optimizer, batches  # type: ignore[return-value]


def one(step: tutti.Step, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A step; all of them share a capture."""
    with captured_once("tied"):
        return step(*batch)


@functools.cache
def on_one_device(program: Callable[[str], list[Tensor]]) -> list[Tensor]:
    """What a program finds there."""
    return program("")


def inside(layout: str) -> list[Tensor]:
    """Weights read and written in blocks between steps."""
    step, model, optimizer, batches = make(layout)
    average = copy.deepcopy(model)
    found = []
    for k, batch in enumerate(batches):
        found.append(one(step, batch))
        with step.whole():
            found.append(evaluated(model, batch[0]))
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
                if k == 1:
                    model.up.weight.mul_(0.9)
                    model.down.weight.data.numpy()[:] += 0.01
            if k == 2:
                model.down.weight.data = model.down.weight.data * 1.1
            if k == 3:
                torch.manual_seed(5)
                nn.init.orthogonal_(model.up.weight)
            if k == 4:
                model.down.weight.requires_grad_(False)
        if k == 5:
            with step.whole(slots=True):
                given = copy.deepcopy(optimizer.state_dict())
            for slots in given["state"].values():
                slots["momentum_buffer"] *= 0.5
            optimizer.load_state_dict(given)
    return [x.detach().clone() for x in (*found, *average.parameters())]


def outside(layout: str) -> list[Tensor]:
    """Elementwise writes between steps without a block, and plain state dicts loaded."""
    step, model, _, batches = make(layout)
    found = []
    for k, batch in enumerate(batches):
        found.append(one(step, batch))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - 0.5 * 0.01)
            model.up.weight.add_(torch.arange(16.0).double()[:, None] * 1e-3)
            model.down.weight.data = model.down.weight.data.clamp(-0.2, 0.2)
            model.up.weight.data = (
                torch.linspace(-1, 1, 128).double().view(16, 8) if k == 2 else model.up.weight.data
            )
            nn.init.zeros_(model.down.bias)
        if k == 4:
            state = step.model_state()
            model.load_state_dict(
                {n: x * 0.9 if x.is_floating_point() else x for n, x in state.items()}
            )
    state = step.model_state()
    assert state["embedding.weight"] is state["head.weight"]
    assert list(state) == list(Tied().state_dict())
    assert {type(x) for x in state.values()} == {Tensor}
    plain = Tied().double()
    plain.load_state_dict(state)
    return [x.detach().clone() for x in (*found, *plain.state_dict().values())]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", [inside, outside])
def test_weights_between_steps_are_those_of_one_device(
    ranks: Ranks, program: Any, layout: str
) -> None:
    expected = on_one_device(program)
    for found in ranks.run(program, layout, n=2):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


class Scaled(nn.Module):
    """Layers that all read one buffer, as those of language models read the angles of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def with_a_buffer_of_all_stages(layout: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Scaled().double()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.distribute(small_steps.step, model, optimizer, layout)
    x = torch.linspace(-1, 1, 32).double().reshape(8, 4)
    losses = [step(x)]
    with step.whole():
        losses.append(small_steps.squares(model, x).detach())
        model.scale.mul_(2.0)
    return [*losses, step(x), *step.model_state().values()]


@pytest.mark.parametrize("layout", ["pipe=2", "pipe=2 micro=2", "data=2 zero=3"])
def test_a_buffer_that_several_stages_keep(ranks: Ranks, layout: str) -> None:
    expected = with_a_buffer_of_all_stages("")
    for found in ranks.run(with_a_buffer_of_all_stages, layout, n=2):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def kept(layout: str) -> tuple[bool, set[str], int, int]:
    """Whether parameters are the user's own; their kinds; the bytes of a block, and of all weights."""
    step, model, optimizer, batches = make(layout)
    own = [*model.parameters()]
    for batch in batches[:2]:
        one(step, batch)
    now = [*model.parameters()]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    same = all(a is b is c for a, b, c in zip(own, now, held, strict=True))
    nbytes = sum(p.numel() * 8 for p in own)
    return same, {type(p).__name__ for p in now}, step.whole().nbytes, nbytes


@pytest.mark.parametrize(
    "layout", ["data=2", "data=2 zero=1", "data=2 zero=2", "replica=2 sync=average(every=2)"]
)
def test_what_a_rank_holds_whole_stays_the_users_own(ranks: Ranks, layout: str) -> None:
    for found in ranks.run(kept, layout, n=2):
        assert found[:3] == (True, {"Parameter"}, 0)


def test_shards_are_dtensors_and_their_whole_is_told(ranks: Ranks) -> None:
    for same, kinds, nbytes, of_all in ranks.run(kept, "data=2 zero=3", n=2):
        assert not same and kinds == {"StateShard"}
        assert nbytes == of_all


def on_one(layout: str) -> list[Tensor]:
    """Rank 1 alone reads and writes; the other sees shards meanwhile."""
    step, model, _, batches = make(layout)
    found = []
    for k, batch in enumerate(batches[:4]):
        found.append(one(step, batch))
        with step.whole(rank=1) as here:
            assert here == (dist.get_rank() == 1)
            if here:
                evaluated(model, batch[0])
                if k == 1:
                    model.up.weight.data.mul_(0.5)
                    model.down.weight.requires_grad_(False)
            elif isinstance(model.up.weight, StateShard):
                with pytest.raises(tutti.TuttiError, match="in shards"):
                    model(batch[0])
    return [x.detach().clone() for x in found]


@functools.cache
def on_one_expected() -> list[Tensor]:
    step, model, _, batches = make("")
    found = []
    for k, batch in enumerate(batches[:4]):
        found.append(one(step, batch).detach().clone())
        if k == 1:
            model.up.weight.data.mul_(0.5)
            model.down.weight.requires_grad_(False)
    return found


@pytest.mark.parametrize("layout", ["data=2 zero=3", "pipe=2"])
def test_one_rank_alone_holds_the_wholes(ranks: Ranks, layout: str) -> None:
    for found in ranks.run(on_one, layout, n=2):
        for x, y in zip(found, on_one_expected(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def refused(layout: str) -> list[str]:
    """What is refused in and around a block; the weights stay."""
    step, model, _, batches = make(layout)
    one(step, batches[0])
    before = step.model_state()
    said = []

    def tried(what: Any) -> None:
        with pytest.raises(tutti.TuttiError) as caught:
            what()
        said.append(str(caught.value))

    def differently() -> None:
        with step.whole(), torch.no_grad():
            model.down.weight += dist.get_rank()

    def stepping() -> None:
        with step.whole():
            step(*batches[1])

    def saving() -> None:
        with step.whole():
            step.save("nowhere")

    def failing() -> None:
        with step.whole(), torch.no_grad():
            model.down.weight += 1
            raise tutti.TuttiError("on purpose")

    def halving() -> None:
        with step.whole(rank=1) as here:
            if here:
                model.down.weight.data = model.down.weight.data.half()

    for what in (differently, stepping, saving, failing, halving):
        tried(what)
    after = step.model_state()
    assert all(torch.equal(after[n], before[n]) for n in before)
    one(step, batches[1])
    return said


@pytest.mark.parametrize("layout", ["data=2 zero=3", "pipe=2"])
def test_a_block_refuses_what_would_be_lost(ranks: Ranks, layout: str) -> None:
    for said in ranks.run(refused, layout, n=2):
        assert 'ranks 0 and 1 wrote different values into "down.weight"' in said[0]
        assert "while its model's weights are whole" in said[1] and "test_whole.py" in said[1]
        assert "while its model's weights are whole" in said[2]
        assert said[3] == "on purpose"
        assert '"down.weight" left the block as torch.float16' in said[4]


def averages(layout: str) -> list[Tensor]:
    """An average of PyTorch's own, outside of the step, used in a block."""
    step, model, _, batches = make(layout)
    one(step, batches[0])
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for batch in batches:
        one(step, batch)
        average.update_parameters(model)
    with tutti.whole(average.module) if layout == "data=2" else step.whole():
        found = evaluated(model, batches[0][0])
    with step.whole(), torch.no_grad():
        for p, mean in zip(model.parameters(), average.module.parameters(), strict=True):
            p.copy_(mean.full_tensor() if isinstance(mean, StateShard) else mean)
        return [found, evaluated(model, batches[0][0])]


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "tensor=2"])
def test_averages_of_pytorch_go_on(ranks: Ranks, layout: str) -> None:
    expected = on_one_device(averages)
    for found in ranks.run(averages, layout, n=2):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def saved(layout: str, path: str) -> None:
    """Rank 0 writes a file of the whole model."""
    step, _, _, batches = make(layout)
    one(step, batches[0])
    state = step.model_state(rank=0)
    assert bool(state) == (dist.get_rank() == 0)
    if state:
        torch.save(state, path)


@pytest.mark.parametrize("layout", ["data=2 zero=3", "pipe=2"])
def test_a_plain_program_loads_what_rank_0_saves(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    ranks.run(saved, layout, str(tmp_path / "model.pt"), n=2)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    step, model, _, batches = make("")
    one(step, batches[0])
    for name, x in model.state_dict().items():
        torch.testing.assert_close(state[name], x, rtol=1e-10, atol=1e-12)


def elsewhere(layout: str) -> list[str]:
    """What is said of the tensors that another place of a pipeline keeps."""
    step, model, _, batches = make(layout)
    one(step, batches[0])
    said = []
    for p in model.parameters():
        if p.device_mesh.get_coordinate() is None:
            with pytest.raises(tutti.TuttiError) as caught:
                p.full_tensor()
            said.append(str(caught.value))
    return said


def test_no_rank_gives_nothing_for_what_another_place_keeps(ranks: Ranks) -> None:
    for said in ranks.run(elsewhere, "pipe=2", n=2):
        assert said and all("step.model_state()" in text for text in said)


def test_one_device_has_all_whole() -> None:
    step, model, _, batches = make("")
    with step.whole(rank=0) as here, tutti.whole(model):
        assert here and step.whole().nbytes == 0
    one(step, batches[0])
    with step.whole():
        one(step, batches[1])
    assert torch.equal(step.model_state()["up.weight"], model.up.weight)


def advice_on_a_mesh(layout: str) -> list[str]:
    """What PyTorch logs of the meshes of shards, in a gathering of each kind."""
    said: list[str] = []
    log = logging.getLogger("torch.distributed.tensor")
    keeping = logging.Handler()
    keeping.emit = lambda record: said.append(record.getMessage())
    log.addHandler(keeping)
    try:
        step, model, optimizer, batches = make(layout)
        one(step, batches[0])
        step.model_state()
        with tutti.whole(model, slots=True):
            pass
        slots = [x for one in optimizer.state.values() for x in one.values()]
        wholes = [x.full_tensor() for x in slots if isinstance(x, StateShard)]
        assert wholes
    finally:
        log.removeHandler(keeping)
    return said


def test_no_advice_on_meshes_that_the_user_has_not_made(ranks: Ranks) -> None:
    """Two axes split one dim: each is gathered in turn."""
    assert ranks.run(advice_on_a_mesh, "data=2 tensor=2 zero=1") == [[]] * 4


def with_ranks_that_are_not(layout: str) -> list[str]:
    """What is said of each, before the first call and after it."""
    step, _, _, batches = make(layout)
    said = []
    for _ in range(2):
        for rank in (7, -1, "0", 1.5, True):
            for read in (step.model_state, lambda rank: step.whole(rank=rank).__enter__()):
                try:
                    said.append(f"found {read(rank=rank)}")
                except tutti.LayoutError as error:
                    said.append(str(error))
        one(step, batches[0])
    assert bool(step.model_state(rank=0)) is (not dist.is_initialized() or dist.get_rank() == 0)
    return said


@pytest.mark.parametrize("layout", ["", "data=2 zero=3", "pipe=2"])
def test_a_rank_that_there_is_not_is_refused(ranks: Ranks, layout: str) -> None:
    every = (
        ranks.run(with_ranks_that_are_not, layout, n=2) if layout else [with_ranks_that_are_not("")]
    )
    for said in every:
        assert len(said) == 20
        assert all("there is no rank" in text or "is no whole number" in text for text in said), (
            said
        )
