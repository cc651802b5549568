"""Errors while a step is captured: PyTorch's get the user's line, the user's own stay theirs."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.errors import CaptureError


def played(wrong: Callable[..., Any]) -> Any:
    def step(model: Any, x: Tensor) -> Any:
        return wrong(model(x), x)

    return tutti.distribute(step, nn.Linear(4, 4))(torch.ones(4, 4))


def numpy(y: Tensor, x: Tensor) -> Tensor:
    return y * float(x.numpy().mean())  # here


def detached(y: Tensor, x: Tensor) -> Tensor:
    return y * torch.from_numpy(y.detach().numpy()).mean()  # here


def array(y: Tensor, x: Tensor) -> Tensor:
    return y * torch.as_tensor(np.asarray(x)).mean()  # here


def function_of_numpy(y: Tensor, x: Tensor) -> Any:
    return y * np.exp(x.mean())  # here


def formatted(y: Tensor, x: Tensor) -> Tensor:
    assert f"{y.mean():.3f}"  # here
    return y


def of_a_list(y: Tensor, x: Tensor) -> Tensor:
    return torch.tensor([y.mean(), x.mean()])  # here


def wrong_shape(y: Tensor, x: Tensor) -> Tensor:
    return y @ x[:3]  # here


def wrong_view(y: Tensor, x: Tensor) -> Tensor:
    return y.view(3, 5)  # here


def of_a_module_of_torch(y: Tensor, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, torch.zeros(3, dtype=torch.long))  # here


def caught(y: Tensor, x: Tensor) -> Tensor:
    try:
        scale = int(y.mean())  # here
    except Exception:
        scale = 1.0
    return y * scale


def caught_from_numpy(y: Tensor, x: Tensor) -> Tensor:
    try:
        return y * float(x.numpy().mean())  # here
    except Exception:
        return y


def seeded(y: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(0)  # here
    return y + torch.rand(4)


def memory(y: Tensor, x: Tensor) -> Tensor:
    return torch.from_dlpack(y.detach())  # here


def logged(y: Tensor, x: Tensor) -> Tensor:
    logging.getLogger("of a test").error("loss %.3f", y.mean())  # here
    return y


def pickled(y: Tensor, x: Tensor) -> Tensor:
    pickle.dumps(y.detach())  # here
    return y


def in_a_thread(y: Tensor, x: Tensor) -> Tensor:
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(y * 2))
    thread.start()
    thread.join()
    return made[0] + x  # here


def json_text(y: Tensor, x: Tensor) -> Tensor:
    assert json.dumps({"loss": y.mean().item()})  # here
    return y


WRONG = [
    json_text,
    caught,
    caught_from_numpy,
    seeded,
    memory,
    logged,
    pickled,
    in_a_thread,
    numpy,
    detached,
    array,
    function_of_numpy,
    formatted,
    of_a_list,
    wrong_shape,
    wrong_view,
    of_a_module_of_torch,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_the_users_line_is_named(wrong: Any) -> None:
    with pytest.raises(CaptureError) as found:
        played(wrong)
    assert "# here" in found.value.at and found.value.fix


def test_the_first_error_is_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="RuntimeError while the step was captured") as found:
        played(wrong_shape)
    assert isinstance(found.value.__cause__, RuntimeError)
    assert not [r for r in caplog.records if "failed while attempting" in r.message]


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError, ZeroDivisionError])
def test_what_the_users_code_raises_stays_theirs(error: type[Exception]) -> None:
    def wrong(y: Tensor, x: Tensor) -> Tensor:
        raise error("mine")

    with pytest.raises(error, match="mine") as found:
        played(wrong)
    assert found.value.__cause__ is None


@pytest.mark.parametrize(
    "wrong", [lambda y, x: {}["a"], lambda y, x: 1 / 0, lambda y, x: y.nothing]
)
def test_mistakes_of_plain_python_stay_theirs(wrong: Any) -> None:
    with pytest.raises((KeyError, ZeroDivisionError, AttributeError)):
        played(wrong)


def test_a_batch_that_the_step_does_not_take() -> None:
    step = tutti.distribute(lambda model, x: model(x), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="takes 2 positional arguments") as found:
        step(torch.ones(4, 4), 1)  # called here
    assert "# called here" in found.value.at
    with pytest.raises(CaptureError, match="unexpected keyword argument 'inputs'") as found:
        step(inputs=torch.ones(4, 4))
    assert "step(...) with the arguments" in found.value.fix


def test_text_without_a_format_may_be_made() -> None:
    with pytest.warns(UserWarning, match="writes a tensor into a text at"):
        played(lambda y, x: (f"{y} {y.shape} {len(x)}", y)[1])


def printing(y: Tensor, x: Tensor) -> Tensor:
    print("y", y)  # here
    return y


def printing_inside(y: Tensor, x: Tensor) -> Tensor:
    print({"y": [y]})  # here
    return y


def logging_it(y: Tensor, x: Tensor) -> Tensor:
    logging.getLogger("tutti.test").warning("y %s", y)  # here
    return y


@pytest.mark.parametrize("wrong", [printing, printing_inside, logging_it])
def test_a_printed_tensor_is_warned_of_with_its_line(wrong: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match=r"text at .*test_unexpected.py:\d+ .*# here"):
        played(wrong)


def test_other_texts_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        played(lambda y, x: (f"{y.shape} {y.dtype} {len(x)}", y)[1])


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (lambda model, loss: model.no_sync(), "micro=K"),
        (lambda model, loss: model.set_requires_gradient_sync(False), "micro=K"),
        (lambda model, loss: model.backward(loss), "loss.backward() and optimizer.step()"),
        (lambda model, loss: model.module, "the model itself"),
    ],
)
def test_methods_of_a_wrapper_that_is_gone_have_the_fix(wrong: Any, fix: str) -> None:
    def step(model: Any, x: Tensor) -> Any:
        loss = model(x).sum()
        wrong(model, loss)
        return loss

    with pytest.raises(CaptureError, match="object has no attribute") as found:
        tutti.distribute(step, nn.Linear(4, 4))(torch.ones(4, 4))
    assert fix in found.value.fix


def test_the_search_for_nan_is_off_in_a_trace_alone() -> None:
    def searching(y: Tensor, x: Tensor) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            z = x.clone().requires_grad_()
            return torch.autograd.grad((z * z).sum(), z)[0]

    with torch.autograd.set_detect_anomaly(True):
        assert played(searching).shape == (4, 4)
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


def test_a_coroutine_is_not_returned() -> None:
    async def step(model: Any, x: Tensor) -> Tensor:
        return model(x)

    with pytest.raises(CaptureError, match="returns a coroutine"):
        tutti.distribute(step, nn.Linear(4, 4))(torch.ones(4, 4)).close()


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(CaptureError, match="a nested tensor") as found:
        tutti.distribute(lambda model, x: model(x), nn.Linear(4, 4))(nested)
    assert "to_padded_tensor" in found.value.fix


def test_a_number_of_values_by_a_tensor_outside_is_refused_in_words() -> None:
    """As torchdiffeq makes the grid of its fixed solvers; PyTorch's own text is an internal assert."""
    end = torch.tensor(2.0)

    def step(model: Any, x: Tensor) -> Tensor:
        grid = torch.arange(0, (end / 0.5 + 1).ceil().item())
        return model(x) * grid.sum()

    with pytest.raises(CaptureError, match="where a plain number decides a size") as found:
        tutti.distribute(step, nn.Linear(4, 4))(torch.ones(4, 4))
    assert "INTERNAL" not in str(found.value) and "torch.arange(0" in found.value.at
