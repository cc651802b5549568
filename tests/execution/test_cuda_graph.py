"""A recorded step is the step: on a tape that does as a CUDA graph does, and on a GPU where there is one."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import tutti
import zoo
from captured_once import captured_once
from tape import record
from tutti.environment import CUDA_GRAPH
from tutti.execution.cuda_graph import (
    MOST_RECORDINGS,
    NUM_WARM_UP,
    RECORDERS,
    WATCHES,
    CudaGraph,
    obstacle,
    op_by_op,
    waits_on_gpu,
)
from tutti.planner.memory import predict

NUM_STEPS = NUM_WARM_UP + 4
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: no CUDA graph"
)
# Adafactor reads its step count and norms of weights; "eval" has no optimizer.
EVERY = [n for n, case in zoo.CASES.items() if not case.random and n not in ("adafactor", "eval")]
# A tape does not look at ops: of models that differ in ops alone one is enough for it. A GPU plays all.
OF_OPS = {
    "vit",
    "qwen3",
    "llama_eager",
    "llama",
    "unet",
    "bert",
    "t5",
    "gpt2",
    "transformer",
    "mamba",
    "lstm",
    "autocast",
    "accumulate",
}
REPLAYED = [n for n in EVERY if torch.cuda.is_available() or n not in OF_OPS]
# Where the model does not matter.
SMALL = zoo.CASES["adamw_fused"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded by a tape, on a CPU."""
    monkeypatch.setenv(CUDA_GRAPH.name, "1")
    monkeypatch.setitem(RECORDERS, "cpu", record)


def exact_rates(optimizer: Optimizer) -> None:
    """Learning rates that float32 holds."""
    for group in optimizer.param_groups:
        group["lr"] = float(torch.tensor(group["lr"]))


def trained(
    case: Any, num_steps: int = NUM_STEPS, layout: str = "", **changes: Any
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Losses and state after some steps, and the step."""
    train_step, model, optimizer, batches = case.build()
    exact_rates(optimizer)
    step = tutti.distribute(train_step, model, optimizer, layout)
    losses = []
    for k in range(num_steps):
        with captured_once(case.name):
            losses.append(step(*batches[k % len(batches)]))
        if change := changes.get(f"after_{k}"):
            change(model, optimizer)
    state = [x.detach().clone() for x in model.state_dict().values()]
    slots = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    return losses, state + slots, step


@cache
def trained_op_by_op(name: str, layout: str = "") -> tuple[list[Tensor], list[Tensor]]:
    """Losses and state of the case after `NUM_STEPS` steps of which none is recorded."""
    assert not CUDA_GRAPH.read()
    return trained(zoo.CASES[name], layout=layout)[:2]


def graph_of(step: tutti.Step) -> CudaGraph:
    assert step._last is not None
    made = step._last.execution._recorded  # type: ignore[union-attr]
    assert made is not None
    return made


def equal(have: list[Tensor], want: list[Tensor]) -> bool:
    return len(have) == len(want) and all(map(torch.equal, have, want))


@pytest.mark.parametrize("name", REPLAYED)
def test_replays_are_the_step_to_the_bit(name: str, request: pytest.FixtureRequest) -> None:
    losses, state = trained_op_by_op(name)
    request.getfixturevalue("recorded")
    replayed, state_replayed, step = trained(zoo.CASES[name])
    assert graph_of(step).num_recordings == 1
    assert equal(replayed, losses) and equal(state_replayed, state)


@pytest.mark.parametrize("layout", ["micro=2", "remat=full", "precision=bf16"])
def test_replays_under_a_layout(layout: str, request: pytest.FixtureRequest) -> None:
    losses, state = trained_op_by_op("gpt", layout)
    request.getfixturevalue("recorded")
    replayed, state_replayed, step = trained(zoo.CASES["gpt"], layout=layout)
    assert graph_of(step).num_recordings == 1
    assert equal(replayed, losses) and equal(state_replayed, state)


# --- what changes between calls ------------------------------------------------------------------


def _rate(model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2


def _decay(model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] += 0.125


def _move(model: nn.Module, optimizer: Optimizer) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def _write(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def _load(model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({name: x * 0.5 for name, x in model.state_dict().items()})


@pytest.mark.parametrize(
    ("change", "num_recordings"),
    [(_rate, 1), (_write, 1), (_load, 1), (_decay, 3), (_move, 3)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_changes_between_calls(
    change: Callable[..., None], num_recordings: int, request: pytest.FixtureRequest
) -> None:
    changes = {f"after_{k}": change for k in (NUM_WARM_UP, NUM_WARM_UP + 2)}
    losses, state, _ = trained(SMALL, **changes)
    request.getfixturevalue("recorded")
    replayed, state_replayed, step = trained(SMALL, **changes)
    assert graph_of(step).num_recordings == num_recordings
    assert equal(replayed, losses) and equal(state_replayed, state)


@pytest.mark.parametrize("change", [_decay, _move], ids=lambda x: x.__name__)
def test_what_changes_at_every_call_is_played_op_by_op(
    change: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    num_steps = NUM_WARM_UP + MOST_RECORDINGS + 3
    changes = {f"after_{k}": change for k in range(num_steps)}
    losses, state, _ = trained(SMALL, num_steps, **changes)
    request.getfixturevalue("recorded")
    told = "weight_decay keeps changing" if change is _decay else "state keeps moving"
    with pytest.warns(UserWarning, match=f"op by op, since .*{told}"):
        replayed, state_replayed, step = trained(SMALL, num_steps, **changes)
    assert graph_of(step).num_recordings == MOST_RECORDINGS
    assert equal(replayed, losses) and equal(state_replayed, state)


def test_a_recording_that_no_longer_fits_is_freed_before_the_next(
    recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory, all activations, would be held twice."""
    past: list[weakref.ref[Any]] = []

    def watched(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        assert all(replay() is None for replay in past)
        replay, result = record(call, device)

        def again() -> None:
            replay()

        past.append(weakref.ref(again))
        return again, result

    monkeypatch.setitem(RECORDERS, "cpu", watched)
    step = trained(SMALL, after_3=_move, after_4=_decay)[2]
    assert graph_of(step).num_recordings == len(past) == 3


class Exchanging(nn.Module):
    """Its two buffers change places at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("left", torch.arange(4.0))
        self.register_buffer("right", -torch.arange(4.0))


def exchange_step(model: Any, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, Tensor, int]:
    loss = ((model.weight * x - model.left) ** 2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        left, right = model.left.clone(), model.right.clone()
        model.left.copy_(right)
        model.right.copy_(left)
    return loss, model.weight, 7


@pytest.mark.usefixtures("recorded")
def test_state_in_place_of_other_state_and_results_that_stay() -> None:
    model, plain = Exchanging(), Exchanging()
    optimizer, own = SGD(model.parameters(), 0.125), SGD(plain.parameters(), 0.125)
    step = tutti.distribute(exchange_step, model, optimizer)
    found, wanted = [], []
    for k in range(NUM_STEPS):
        x = torch.full((4,), float(k))
        found.append(step(x))
        loss, weight, number = exchange_step(plain, own, x)
        wanted.append((loss, weight.detach().clone(), number))
        assert torch.equal(model.left, plain.left) and torch.equal(model.right, plain.right)
    graph_of(step)
    for have, want in zip(found[NUM_WARM_UP:], wanted[NUM_WARM_UP:], strict=True):
        assert equal(list(have[:2]), list(want[:2])) and have[2] == want[2]


# --- where there is to be no recording -----------------------------------------------------------


def test_nothing_is_recorded_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)
    for value in ("", "0"):
        monkeypatch.setenv(CUDA_GRAPH.name, value)
        step = trained(SMALL, 1)[2]
        assert step._last.execution._recorded is None


def test_state_that_may_not_be_overwritten_is_played_op_by_op(recorded: None) -> None:
    step = trained(SMALL, 1)[2]
    program, execution = step.program, step._last.execution
    found = obstacle(program, execution.graph, frozenset(), torch.device("cpu"))
    assert found == f'"{program.captured.updated[0]}" shares memory with other state'


@pytest.mark.usefixtures("recorded")
def test_random_numbers_are_played_op_by_op() -> None:
    case = next(c for c in zoo.CASES.values() if c.random)
    with pytest.warns(UserWarning, match=r"op by op, since it draws random numbers at .*\.py:\d+"):
        trained(case, 1)


@pytest.mark.usefixtures("recorded")
def test_values_that_are_read_are_played_op_by_op() -> None:
    with pytest.warns(UserWarning, match=r"since it reads a value of a tensor at .*\.py:\d+"):
        trained(zoo.CASES["adafactor"], 1)


def test_state_on_another_device_is_played_op_by_op(recorded: None) -> None:
    """As the step counts of an optimizer that is neither fused nor capturable."""
    step = trained(SMALL, 1)[2]
    program, execution = step.program, step._last.execution
    given = (program, execution.graph, execution.donated)
    assert obstacle(*given, torch.device("cpu")) == ""
    name = program.captured.inputs[0]
    assert obstacle(*given, torch.device("cuda")) == f'"{name}" lies on cpu'


def test_a_model_on_a_cpu_is_played_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_GRAPH.name, "1")
    with pytest.warns(UserWarning, match="op by op, since its model lies on cpu"):
        trained(SMALL, 1)


def test_what_cannot_be_recorded_is_played_op_by_op(
    recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(call: Callable[[], Any], device: torch.device) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setitem(RECORDERS, "cpu", fail)
    with pytest.warns(UserWarning, match="since operation not permitted when stream is capturing "):
        losses, state, _ = trained(SMALL)
    monkeypatch.delenv(CUDA_GRAPH.name)
    wanted, state_wanted = trained_op_by_op(SMALL.name)
    assert equal(losses, wanted) and equal(state, state_wanted)


def test_a_step_that_waits_for_the_gpu_is_never_recorded(
    recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: Callable[[], Any], device: torch.device) -> Any:
        raise AssertionError("recorded")

    monkeypatch.setitem(RECORDERS, "cpu", refuse)
    told = "called a synchronizing CUDA operation"
    monkeypatch.setitem(WATCHES, "cpu", lambda: contextlib.nullcontext([told]))
    with pytest.warns(UserWarning, match=f"since an op waits for the GPU: {told}"):
        losses, _, _ = trained(SMALL)
    assert len(losses) == NUM_STEPS


def test_only_waits_count_as_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says once that the mode which tells of them is new, and others warn meanwhile."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    new = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing"
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: mode and warnings.warn(new, stacklevel=2)
    )
    waits = "called a synchronizing CUDA operation"
    with pytest.warns(UserWarning, match="^mine$") as told, waits_on_gpu() as found:
        warnings.warn("mine", stacklevel=2)
        warnings.warn(waits, stacklevel=2)
    assert found == [waits] and len(told) == 1


def test_a_constant_elsewhere_is_played_op_by_op(recorded: None) -> None:
    tables = MappingProxyType({0: torch.arange(4.0)})  # nothing looks there: it stays a constant

    def lookup_step(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = (model(x) * tables[0]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = nn.Linear(4, 4)
    step = tutti.distribute(lookup_step, model, SGD(model.parameters(), 0.125))
    step(torch.ones(2, 4))
    program, execution = step.program, step._last.execution
    given = (program, execution.graph, execution.donated, torch.device("cpu"))
    assert obstacle(*given) == ""
    constant = next(n for n in execution.graph.nodes if n.op == "get_attr")
    constant.meta["val"] = constant.meta["val"].to("meta")
    assert obstacle(*given) == "a constant of shape [4] lies on meta"


@pytest.mark.usefixtures("recorded")
def test_a_measured_step_is_played_op_by_op() -> None:
    train_step, model, optimizer, batches = SMALL.build()
    step = tutti.distribute(train_step, model, optimizer)
    for _ in range(NUM_STEPS):
        step(*batches[0])
    replay, calls = graph_of(step)._recording, []
    assert replay is not None
    play = replay.replay
    replay.replay = lambda: (calls.append(1), play())[1]
    step.measure(*batches[0])
    assert not calls
    step(*batches[0])
    assert calls == [1]
    with op_by_op():
        step(*batches[0])
    assert calls == [1]


# --- on a GPU --------------------------------------------------------------------------------------


def wide_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cuda_graph_is_the_step(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to what sums in another order do: a GPU adds an embedding's gradient in any order."""
    found: list[list[Tensor]] = []
    for asked in ("0", "1"):
        monkeypatch.setenv(CUDA_GRAPH.name, asked)
        train_step, model, optimizer, batches = zoo.CASES[name].build()
        assert optimizer is not None
        exact_rates(optimizer)
        model = model.cuda()  # in place: the optimizer's parameters are these
        step = tutti.distribute(train_step, model, optimizer, f"precision={precision}")
        given = [tuple(x.cuda() for x in batch) for batch in batches]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses = [step(*given[k % len(given)]).float() for k in range(NUM_STEPS)]
        assert asked == "0" or graph_of(step).num_recordings == 1
        found.append(losses)
    torch.testing.assert_close(
        found[1], found[0], rtol=1e-2 if precision == "bf16" else 1e-4, atol=0
    )


@pytest.mark.gpu
@needs_gpu
def test_predicted_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_GRAPH.name, "1")
    layers = [m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    step = tutti.distribute(wide_step, model, AdamW(model.parameters(), fused=True))
    batch = torch.randn(2, 4096, 2048, device="cuda").unbind()
    for _ in range(NUM_STEPS):
        step(*batch)
    step.measure(*batch)
    assert step._last is not None and step._last.measured is not None
    predicted = predict(step.program, step._last.execution.graph).call_nbytes
    assert abs(step._last.measured - predicted) < 0.05 * predicted
