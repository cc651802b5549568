"""What may be given as the model: compiled and wrapped modules, and several modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from ranks import Ranks
from tutti.capture.state.models import Models, as_one_module
from tutti.errors import CaptureError, TuttiError


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=made), torch.randn(8, 4, generator=made)


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def trained(model: Any) -> Program:
    return step, model, AdamW(model.parameters(), lr=1e-2), batch()


def compiled_module() -> Program:
    return trained(torch.compile(mlp(), backend="eager"))


def compiled_in_place() -> Program:
    model = mlp()
    model.compile(backend="eager")
    return trained(model)


def compiled_part() -> Program:
    model: Any = mlp()
    model[0] = torch.compile(model[0], backend="eager")
    return trained(model)


def compiled_step() -> Program:
    model = mlp()
    compiled: Any = torch.compile(step, backend="eager")
    return compiled, model, AdamW(model.parameters(), lr=1e-2), batch()


@torch.compile(backend="eager")
def compiled_loss(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y) + x.abs().mean()


def compiled_helper() -> Program:
    def with_helper(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = compiled_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return with_helper, *trained(mlp())[1:]


def compiled_update() -> Program:
    train_step, model, optimizer, given = trained(mlp())
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return train_step, model, optimizer, given


def in_data_parallel() -> Program:
    return trained(nn.DataParallel(mlp()))


def gan() -> Program:
    models: dict[str, Any] = {
        "G": nn.Linear(4, 8),
        "D": torch.compile(nn.Linear(8, 1), backend="eager"),
    }
    optimizers = {k: Adam(m.parameters(), lr=0.01) for k, m in models.items()}

    def adversarial(models: Any, optimizers: Any, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        assert type(models) is dict and list(models) == ["G", "D"]
        fake = models["G"](z)
        d = F.softplus(models["D"](fake.detach())).mean() + F.softplus(-models["D"](x)).mean()
        optimizers["D"].zero_grad()
        d.backward()
        optimizers["D"].step()
        g = F.softplus(-models["D"](fake)).mean()
        optimizers["G"].zero_grad()
        g.backward()
        optimizers["G"].step()
        return {"d": d, "g": g}

    return adversarial, models, optimizers, batch()


def pair() -> Program:
    encoder, decoder = nn.Linear(8, 8), nn.Linear(8, 4)

    def both(models: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        encode, decode = models
        return step(lambda x: decode(encode(x)), optimizer, x, y)

    optimizer = Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    return both, (encoder, decoder), optimizer, batch()


COMPILED = [
    compiled_module,
    compiled_in_place,
    compiled_part,
    compiled_step,
    compiled_helper,
    compiled_update,
]


@pytest.mark.parametrize("program", COMPILED, ids=lambda p: p.__name__)
def test_compiled_code_is_traced_as_it_was_before(program: Any) -> None:
    assert_as_eager(program)


@pytest.mark.parametrize("program", [in_data_parallel, gan, pair], ids=lambda p: p.__name__)
def test_wrapped_and_several_modules(program: Any) -> None:
    assert_as_eager(program)


@pytest.mark.parametrize(
    ("program", "layout"),
    [(compiled_module, "data=2"), (gan, "data=2 zero=3"), (pair, "data=2 zero=3")],
)
def test_two_ranks(ranks: Ranks, program: Any, layout: str) -> None:
    assert_as_eager_on_ranks(ranks, program, layout)


def test_nothing_is_compiled_while_a_step_is_captured() -> None:
    def never(_module: Any, _inputs: Any) -> Any:
        raise AssertionError("compiled")

    model: Any = torch.compile(mlp(), backend=never)
    tutti.distribute(step, model, AdamW(model.parameters()))(*batch_in_float32())


def batch_in_float32() -> tuple[Tensor, ...]:
    return tuple(x.float() for x in batch())


def test_names_are_those_of_the_module_inside() -> None:
    model: Any = torch.compile(nn.DataParallel(mlp()), backend="eager")
    names = {n for n, _ in as_one_module(step, model)[1].named_parameters()}
    assert names == {n for n, _ in mlp().named_parameters()}


def test_steps_on_the_same_modules_share_a_holder() -> None:
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    one, other = (as_one_module(step, {"G": g, "D": d})[1] for _ in range(2))
    assert one is other and isinstance(one, Models)
    assert [n for n, _ in one.named_parameters()] == ["G.weight", "G.bias", "D.weight", "D.bias"]


def test_a_step_and_an_evaluation_of_several_models() -> None:
    train_step, models, optimizers, given = gan()
    train = tutti.distribute(train_step, models, optimizers)
    sample = tutti.distribute(lambda models, z: models["G"](z), models)
    given = batch_in_float32()
    before = sample(given[1])
    train(*given)
    after = sample(given[1])
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, models["G"](given[1]))


def test_a_scripted_module_is_refused() -> None:
    model: Any = torch.jit.script(mlp())
    with pytest.raises(CaptureError, match="is a torch"):
        tutti.distribute(step, model, AdamW(model.parameters()))


def test_scripted_functions_are_traced() -> None:
    @torch.jit.script
    def act(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def scripted(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(lambda x: act(model(x)), optimizer, x, y)

    assert_as_eager(lambda: (scripted, *trained(mlp())[1:]))


@pytest.mark.parametrize("given", [lambda x: x, None, {"a": 1}, "model"])
def test_what_is_no_model_is_refused(given: Any) -> None:
    with pytest.raises(TuttiError, match="as the model, got"):
        tutti.distribute(step, given)


def test_a_lazy_module_is_refused_until_it_has_been_called() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match="has no shape yet"):
        tutti.distribute(step, model)
    model(torch.ones(2, 8))
    tutti.distribute(step, model)


def test_a_model_that_fsdp_has_split_is_refused() -> None:
    class FSDPModule: ...  # as `fully_shard` changes the class of a module

    class FSDPLinear(FSDPModule, nn.Linear): ...

    model = nn.Sequential(nn.Linear(2, 2), FSDPLinear(2, 2))
    with pytest.raises(CaptureError, match=r"1 has been given to fully_shard") as found:
        tutti.distribute(lambda model, x: model(x), model)
    assert "zero=3" in found.value.fix


def test_an_engine_of_deepspeed_is_refused() -> None:
    class DeepSpeedEngine(nn.Sequential): ...

    with pytest.raises(CaptureError, match=r"the model has been given to deepspeed\.initialize"):
        tutti.distribute(lambda model, x: model(x), DeepSpeedEngine(nn.Linear(2, 2)))
