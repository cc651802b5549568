"""A user's mistakes at the public functions: refused before anything starts, with the way out."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import runs
import tutti
import zoo
import zoo_steps
from ranks import Ranks
from tutti.errors import CaptureError, CommError, LayoutError, ShardingError, TuttiError

X, Y = torch.randn(8, 16), torch.randint(0, 8, (8,))


def parts(layout: str, **options: Any) -> tutti.Step:
    train_step, model, optimizer, _ = zoo.CASES["sgd"].build()
    return tutti.distribute(train_step, model, optimizer, layout, **options)


def refused(kind: type[TuttiError], call: Callable[[], Any]) -> TuttiError:
    """The error of `call`; it says what is wrong and how to mend it."""
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.what and caught.value.fix, caught.value
    return caught.value


def on_virtual_ranks(layout: str, place: dict[str, str] | None = None, rows: int = 8) -> Any:
    train_step, model, optimizer, _ = zoo.CASES["sgd"].build()
    batch = (torch.randn(rows, 16), torch.randint(0, 8, (rows,)))
    return tutti.verify(train_step, model, optimizer, batch, layout, place=place)


def test_a_batch_that_does_not_divide() -> None:
    """It is played, and what that costs is said; replicas refuse it."""
    with pytest.warns(UserWarning, match=r"6 samples of batch tensor 0 .* data=4.*drop_last=True"):
        assert on_virtual_ranks("data=4", rows=6).ok
    error = refused(
        ShardingError, lambda: on_virtual_ranks("replica=4 sync=average(every=2)", rows=6)
    )
    assert re.search(r"size 6.*replica", error.what)
    assert "8" in error.fix


def test_a_layout_of_another_size_than_the_run() -> None:
    step = parts("data=2 tensor=2")
    before = {n: p.clone() for n, p in step.model.named_parameters()}
    error = refused(LayoutError, lambda: step(X, Y))
    assert "needs 4 ranks, but 1 were started" in error.what
    assert "2 x 2 = 4" in error.why
    assert all(torch.equal(p, before[n]) for n, p in step.model.named_parameters())


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dta=2", "did you mean data"),
        ("data=2 zreo=1", "did you mean zero"),
        ("data", "has no value"),
        ("data=0", "not a whole number"),
        ("data=two", "not a whole number"),
        ("data=2 data=2", "appears twice"),
        ("data=2 zero=4", "not a level of ZeRO"),
        ("tensor=2 zero=3", "lacks"),
        ("pipe=2 schedule=fast", "is unknown"),
        ("precision=fp16", "is unknown"),
    ],
)
def test_a_layout_that_cannot_be_read(layout: str, said: str) -> None:
    assert said in str(refused(LayoutError, lambda: parts(layout)))


@pytest.mark.parametrize("word", ["server=1", "server=2 sync=step", "sync=async"])
def test_servers_without_workers(word: str) -> None:
    error = refused(LayoutError, lambda: parts(f"data=2 {word}"))
    assert "lacks" in error.what and "replica=2 data=2 sync=" in error.fix


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"*.upp.weight": "tensor, -"}, "up.weight"),
        ({"up.weight": "tensor"}, "2 dims|one entry|entries"),
        ({"up.weight": "tensr, -"}, "tensr"),
        ({"head.weight": "tensor, -"}, "size 8.*tensor|does not divide|cannot split"),
    ],
    ids=["no such parameter", "wrong number of entries", "no such axis", "does not divide"],
)
def test_a_place_that_does_not_fit(place: dict[str, str], said: str) -> None:
    error = refused(ShardingError, lambda: on_virtual_ranks("tensor=3", place))
    assert re.search(said, str(error)), error


def _convolutional(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"place": {"0.weight": ("tensor", "-")}},
            "place['0.weight']=('tensor', '-') is of type tuple",
        ),
        ({"place": {"0.weight": None}}, "place['0.weight']=None"),
        ({"place": {0: "tensor, -"}}, "a name in place=0 is of type int"),
        ({"place": 3}, "place=3 is of type int, not a mapping"),
        ({"place": "tensor, -"}, "place='tensor, -' is of type str"),
        ({"cut": None}, "cut=None is of type NoneType"),
        ({"cut": 3}, "cut=3 is of type int"),
        ({"cut": [3]}, "cut[0]=3 is of type int"),
    ],
)
def test_arguments_of_another_type(options: dict[str, Any], said: str) -> None:
    kind = LayoutError if "cut" in options else ShardingError
    assert said in refused(kind, lambda: parts("tensor=2", **options)).what


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None, True])
def test_a_proof_of_no_step(steps: Any) -> None:
    train_step, model, optimizer, _ = zoo.CASES["sgd"].build()
    given = train_step, model, optimizer, (X, Y), "data=2"
    error = refused(TuttiError, lambda: tutti.verify(*given, steps=steps))
    assert f"steps={steps!r} is no whole number from 1" in error.what


def test_one_axis_for_two_dims() -> None:
    error = refused(
        ShardingError, lambda: on_virtual_ranks("tensor=2", {"up.weight": "tensor, tensor"})
    )
    assert "names the axis tensor twice" in error.what and "up.weight" in error.at


def test_stages_that_begin_nowhere_new() -> None:
    train_step, model, optimizer, _ = zoo.CASES["sgd"].build()
    given = train_step, model, optimizer, (X, Y), "pipe=2 micro=2"
    error = refused(LayoutError, lambda: tutti.verify(*given, cut="*"))
    assert "the first stage begins at 0" in error.why and "such as" in error.fix


def test_explaining_a_tensor_that_is_no_name() -> None:
    step = parts("")
    step(X, Y)
    error = refused(TuttiError, lambda: step.explain(tensor=3))  # type: ignore[arg-type]
    assert "tensor=3 is of type int, not a text" in error.what


def _placed_convolution(text: str) -> Any:
    model = nn.Sequential(nn.Conv2d(4, 4, 4, padding=1), nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(4, 4, 8, 8),)
    return tutti.verify(
        _convolutional, model, optimizer, batch, "tensor=2", place={"0.weight": text}
    )


def test_a_place_that_the_op_cannot_take() -> None:
    error = refused(ShardingError, lambda: _placed_convolution("-, -, tensor, -"))
    assert 'convolution cannot take "0.weight" split over tensor' in error.what
    assert "test_errors.py" in error.at and 'place["0.weight"]' in error.why
    assert _placed_convolution("tensor, -, -, -").ok
    assert _placed_convolution("-, tensor, -, -").ok  # the bias is added once, after the sum


def test_an_axis_of_another_layout_is_no_mistake() -> None:
    assert on_virtual_ranks("data=2", {"up.weight": "tensor, -"}).ok


def test_an_optimizer_of_another_model() -> None:
    train_step, model, _, _ = zoo.CASES["sgd"].build()
    other = zoo.sgd(nn.Linear(2, 2))
    error = refused(CaptureError, lambda: tutti.distribute(train_step, model, other, "")(X, Y))
    assert "SGD holds a parameter of shape [2, 2]" in error.what


def test_something_that_is_no_optimizer() -> None:
    train_step, model, _, _ = zoo.CASES["sgd"].build()
    not_one: Any = model.parameters()
    error = refused(TuttiError, lambda: tutti.distribute(train_step, model, not_one, ""))
    assert "torch.optim.Optimizer" in error.what


def converting_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    if int(loss) > 1:  # here it is converted
        loss = loss * 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def line_of(comment: str) -> str:
    """Where a comment stands in this file, as errors name it."""
    with open(__file__) as file:
        return f"test_errors.py:{1 + next(i for i, s in enumerate(file) if f'# {comment}' in s)}"


def test_a_plain_number_of_a_tensors_value() -> None:
    model = nn.Linear(4, 4)
    step = tutti.distribute(converting_step, model, zoo.sgd(model), "")
    error = refused(CaptureError, lambda: step(X[:, :4]))
    assert line_of("here it is converted") in error.at


def test_explain_before_the_first_call() -> None:
    refused(LayoutError, parts("").explain)


def another_layout() -> str:
    """On a rank: a second `distribute` of the same model, by another layout."""
    train_step, model, optimizer, batches = zoo.CASES["sgd"].build()
    tutti.distribute(train_step, model, optimizer, "data=2")(*batches[0])
    try:
        tutti.distribute(train_step, model, optimizer, "data=2 zero=3")(*batches[0])
    except LayoutError as error:
        return str(error)
    return ""


def test_a_model_has_one_layout(ranks: Ranks) -> None:
    for said in ranks.run(another_layout, n=2):
        assert 'laid out as "data=2" already, not "data=2 zero=3"' in said
        assert "fix" in said


def own_batch() -> tuple[str, bool]:
    """On a rank: its own part of the batch, as a DistributedSampler would give it."""
    play = runs.prepare("sgd", "data=2")
    x, y = play.batches[0]
    half = int(os.environ["RANK"]) * 4
    before = [p.detach().clone() for p in play.step.model.parameters()]
    try:
        play.step(x[half : half + 4], y[half : half + 4])
    except CommError as error:
        after = list(play.step.model.parameters())
        return str(error), all(map(torch.equal, before, after))
    return "", False


def test_different_batches_on_the_ranks(ranks: Ranks) -> None:
    for said, same in ranks.run(own_batch, n=2):
        assert "different batches" in said
        assert "rank 0: batch tensor 0" in said and "rank 1: batch tensor 0" in said
        assert "same *global* batch" in said
        assert same


def own_seed() -> str:
    """On a rank: a seed of its own, as many scripts add the rank to it."""
    train_step, model, optimizer, batches = zoo.CASES["sgd"].build()
    rank = int(os.environ["RANK"])
    try:
        tutti.distribute(train_step, model, optimizer, "data=2", seed=rank)(*batches[0])
    except CommError as error:
        return str(error)
    return ""


def test_different_seeds_on_the_ranks(ranks: Ranks) -> None:
    for said in ranks.run(own_seed, n=2):
        assert "different seeds" in said and "rank 0: seed=0" in said and "rank 1: seed=1" in said


def other_programs() -> str:
    """On a rank: rank 1 has a model with one layer more."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(1 + int(os.environ["RANK"]))]
    model = nn.Sequential(*layers)
    step = tutti.distribute(mean_step, model, zoo.sgd(model), "data=2")
    try:
        step(torch.ones(8, 4))
    except CommError as error:
        return str(error)
    return ""


def mean_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_ranks_with_different_programs_show_both_orders(ranks: Ranks) -> None:
    for said in ranks.run(other_programs, n=2):
        assert "different collectives" in said
        assert "rank 0: " in said and "rank 1: " in said
        assert "fix" in said


def log_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).log().mean()  # NaN for what is negative
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def positive_and_negative() -> tuple[tutti.Step, Tensor]:
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        assert model.bias is not None
        model.bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tutti.distribute(log_step, model, optimizer, ""), torch.ones(8, 4)


def test_a_loss_that_is_not_finite_warns_with_its_step() -> None:
    step, x = positive_and_negative()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)
    with pytest.warns(UserWarning, match="step 1 returned nan.*TUTTI_CHECK_NAN=1"):
        step(-x)


def test_steps_in_a_row_with_nan_warn_at_powers_of_two() -> None:
    step, x = positive_and_negative()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for sign in [-1] * 9 + [1, -1]:
            step(sign * x)
    said = [str(w.message).partition(";")[0] for w in caught if "returned nan" in str(w.message)]
    before = [f", as did the {n} before it" for n in (1, 3, 7)]
    steps = [(0, ""), (1, before[0]), (3, before[1]), (7, before[2]), (10, "")]
    assert said == [f"step {k} returned nan{more}" for k, more in steps]


def test_a_complex_number_may_be_returned() -> None:
    def spectrum(model: nn.Linear, x: Tensor) -> Tensor:
        return torch.fft.fft(model(x).flatten())[1]

    model, x = nn.Linear(4, 1), torch.ones(8, 4)
    found = tutti.distribute(spectrum, model)(x)
    torch.testing.assert_close(found, spectrum(model, x).detach())


def test_check_nan_stops_at_the_first_node_and_keeps_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUTTI_CHECK_NAN", "1")
    step, x = positive_and_negative()
    first = step(x)
    before = {n: t.clone() for n, t in step.state_dict().items()}
    with pytest.raises(TuttiError) as caught:
        step(-x)
    assert "log" in caught.value.what and "step 1" in caught.value.what
    assert line_of("NaN for what is negative") in caught.value.at
    after = step.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert step(x) < first  # it goes on from there


def test_check_nan_looks_at_complex_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def phase(model: nn.Linear, x: Tensor) -> Tensor:
        waves = torch.fft.fft(model(x).flatten())
        turned = waves / (waves - waves)  # NaN
        return turned.real.isnan().sum()

    monkeypatch.setenv("TUTTI_CHECK_NAN", "1")
    step = tutti.distribute(phase, nn.Linear(4, 1))
    with pytest.raises(TuttiError, match=r"div\.Tensor made NaN or infinity"):
        step(torch.ones(8, 4))


def test_check_nan_lets_masks_be_and_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = runs.prepare("llama_eager").losses(2)
    monkeypatch.setenv("TUTTI_CHECK_NAN", "1")
    runs.assert_same_losses(runs.prepare("llama_eager").losses(2), expected)


def test_a_second_mistake_is_not_hidden_by_the_first() -> None:
    """After a refused call, the step still takes a right one."""
    train_step, model, optimizer, batches = zoo.CASES["sgd"].build()
    step = tutti.distribute(train_step, model, optimizer, "")
    with pytest.raises(Exception):  # noqa: B017 (PyTorch's own: the shapes do not fit)
        step(torch.randn(8, 3), batches[0][1])
    step(*batches[0])
    assert F.cross_entropy is zoo_steps.F.cross_entropy
    assert step.num_steps == 1
