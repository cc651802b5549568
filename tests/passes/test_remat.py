"""`remat`: the same bits from less memory; before and after as text; budgets kept, or refused."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn.utils.parametrizations import weight_norm

import runs
import subjects
import tutti
import zoo
import zoo_models
import zoo_steps
from captured_once import captured_once
from ranks import Ranks
from tutti.errors import LayoutError
from tutti.execution.measure import peak_nbytes
from tutti.graph.analysis.state import is_state
from tutti.graph.analysis.storage import Storages
from tutti.graph.edits.edit import RECOMPUTED
from tutti.graph.ops import collectives
from tutti.graph.text import text
from tutti.layout import Layout
from tutti.layout.budget import Budget
from tutti.partition.partition import Program
from tutti.passes.pass_table import optimized, ready_to_split
from tutti.passes.remat import remat
from tutti.passes.remat_segments import kept_blocks
from tutti.passes.target import Target
from tutti.planner.memory import predict


def deep_gpt(num_layers: int = 2) -> tuple[Any, ...]:
    """A GPT whose activations are most of its memory, with dropout."""
    make = partial(zoo_models.GPT, dim=16, seq=64, num_layers=num_layers, dropout=0.1)
    return zoo.build(make, partial(zoo_steps.token_batch, seq=64), optimizer=zoo.sgd)


def prepared(layout: str, built: tuple[Any, ...]) -> tuple[tutti.Step, Any]:
    train_step, model, optimizer, batches = built
    return tutti.distribute(train_step, model, optimizer, layout), batches[0]


def played(layout: str) -> tuple[list[float], dict[str, NDArray[Any]], int]:
    """The losses of three steps, the whole state after them, and the bytes that a step takes."""
    step, batch = prepared(layout, deep_gpt())
    with captured_once("deep_gpt"):
        losses = [step(*batch).item() for _ in range(3)]
    play = runs.Play(step, [batch])
    return losses, play.whole_state(), peak_nbytes(lambda: step(*batch))[0]


def train_mlp(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def mlp_program(depth: int = 2) -> Program:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(4, 4, bias=False), nn.GELU()]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return tutti.distribute(train_mlp, model, optimizer, "").program_of((torch.ones(3, 4),))


def rewritten(program: Program, budget: Budget) -> str:
    graph = optimized(program, Target(), without={"remat", "in_place", "early_update", "linear"})
    remat(graph, program.captured.mode, budget, lambda _: 0)
    lines = [line.split("  #")[0].split() for line in text(graph).splitlines()]
    return "\n".join(" ".join(words) for words in lines if "input()" not in words)


# What crosses the cut is kept (%8), what the backward reads before it is recomputed (%19 for %7).
GOLDEN = """\
%6: f32[4, 4] = permute(%0.weight, [1, 0])
%7: f32[3, 4] = mm(%batch.0, %6)
%8: f32[3, 4] = gelu(%7)
%9: f32[4, 4] = permute(%2.weight, [1, 0])
%10: f32[3, 4] = mm(%8, %9)
%11: f32[3, 4] = gelu(%10)
%12: f32[] = sum.dim_IntList(%11, [0, 1], False)
%13: f32[] = full([], 1, dtype=f32, device=cpu)
%14: f32[3, 4] = expand(%13, [3, 4])
%15: f32[3, 4] = gelu_backward(%14, %10)
%16: f32[4, 3] = permute(%15, [1, 0])
%17: f32[4, 4] = mm(%16, %8)
%18: f32[3, 4] = mm(%15, %2.weight)
%19: f32[3, 4] = mm(%batch.0, %6)
%20: f32[3, 4] = gelu_backward(%18, %19)
%21: f32[4, 3] = permute(%20, [1, 0])
%22: f32[4, 4] = mm(%21, %batch.0)
%23: several = sgd([%0.weight, %2.weight], [%22, %17], [], weight_decay=%optim.0.weight_decay, momentum=0.0, lr=%optim.0.lr, dampening=0, nesterov=False, maximize=False)
%24: f32[4, 4] = item(%23, 0)
%25: f32[4, 4] = item(%23, 1)"""  # noqa: E501


def test_before_and_after() -> None:
    assert rewritten(mlp_program(), Budget()) == GOLDEN


@pytest.mark.parametrize("layout", ["", "data=2 zero=3"])
def test_equal_bits_from_less_memory(ranks: Ranks, layout: str) -> None:
    def play(text: str) -> Any:
        one = ranks.after(played, "" if layout else text)
        return one.run(played, text, n=2)[0] if layout else one.result

    losses, state, nbytes = play(layout)
    for word, share in (("full", 0.4), ("0.5", 0.7)):
        again, state_again, less = play(f"{layout} remat={word}")
        assert again == losses
        assert all((state[n] == state_again[n]).all() for n in state)
        assert less < share * nbytes


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt_tied", "data=2 tensor=2 remat=full"),
        ("llama", "data=2 zero=3 remat=full"),
        ("resnet", "data=2 remat=full"),
        ("two_losses", "data=2 remat=0.5"),
        ("accumulate", "data=2 zero=3 remat=full"),
        ("checkpoint", "data=2 tensor=2 remat=full"),
        ("lstm", "data=2 remat=0.5"),
    ],
)
def test_the_same_step_on_virtual_ranks(name: str, layout: str) -> None:
    if name == "lstm":  # its steps in time need what each has left: it cannot be halved
        layout = layout.replace("0.5", "0.8")
    assert subjects.verdict(name, layout).ok


def test_full_falls_with_the_square_root_of_the_depth() -> None:
    """Kept by `full`: about 2 sqrt(n) inputs of segments; by none: n layers' activations."""
    held = {}
    for depth in (4, 64):
        program = mlp_program(depth)
        graph = optimized(program, Target(), without={"remat"})
        storages = Storages(graph, program.captured.mode)
        held[depth] = sum(b.nbytes for blocks in kept_blocks(graph, storages) for b in blocks)
    assert held[64] / held[4] <= 6  # 16 times as deep


def test_a_share_counts_what_is_kept_and_not_the_weights_that_it_looks_at() -> None:
    """In small slices of the batch, too, where transposed weights are larger than what is kept."""
    for layout in ("remat=0.3", "micro=4 remat=0.3"):
        program = subjects.program("gpt", layout)
        graph = ready_to_split(program, _target(program), ())
        plain = ready_to_split(program, _target(program), ("remat",))
        storages = Storages(plain, program.captured.mode)
        crossing, last = kept_blocks(plain, storages)
        assert not any(storages.is_given(b) for b in crossing | last)
        assert len(graph.nodes) > len(plain.nodes)


def _casts_of_weights(graph: fx.Graph) -> int:
    casts = (n for n in graph.nodes if n.target is torch.ops.aten._to_copy.default)
    return sum(is_state(n.all_input_nodes[0]) for n in casts)


@pytest.mark.parametrize("layout", ["micro=4", "pipe=2 micro=4", "micro=4 pipe=2 zero=1 data=2"])
@pytest.mark.parametrize("word", ["full", "0.5"])
def test_micro_batches_share_the_casts_of_weights(layout: str, word: str) -> None:
    """A second cast before them would stay beside the first."""
    program = subjects.program("gpt", f"{layout} precision=bf16 remat={word}")
    graph = ready_to_split(program, _target(program), ())
    plain = ready_to_split(program, _target(program), ("remat",))
    assert _casts_of_weights(graph) == _casts_of_weights(plain) > 0
    assert any(RECOMPUTED in n.meta for n in graph.nodes)  # values of the batch


def test_each_micro_batch_gathers_a_weight_for_its_backward() -> None:
    program = subjects.program("gpt", "data=2 zero=3 micro=4 remat=full")
    graph = ready_to_split(program, _target(program), ())
    gathers = [n for n in graph.nodes if n.target is collectives.all_gather]
    regions = [n.meta["region"] for n in gathers if is_state(n.args[0])]  # type: ignore[arg-type]
    assert regions.count("backward") >= regions.count("forward") / 2 > 0


@cache
def one_layer() -> Program:
    """A GPT of one layer, whose layout each test sets."""
    step, batch = prepared("", deep_gpt(1))
    return step.program_of(batch)


def test_a_budget_of_bytes_is_kept_with_less_work_than_full() -> None:
    program = one_layer()
    program.layout = Layout()
    whole = predict(program).peak_nbytes
    program.layout = Layout.parse("remat=full")
    least = predict(program).peak_nbytes
    num_full = len(optimized(program, _target(program)).nodes)
    sizes = []
    for part in (0.75, 0.5, 0.25):
        nbytes = int(least + part * (whole - least))
        program.layout = Layout(remat=f"{nbytes / 1000:.3f}kB")
        graph = optimized(program, _target(program))
        assert predict(program, graph).peak_nbytes <= nbytes
        sizes.append(len(graph.nodes))
    assert sizes == sorted(sizes) and sizes[0] < num_full


@pytest.mark.parametrize("layout", ["data=2", "data=2 micro=2", "data=2 zero=3"])
def test_a_budget_of_bytes_counts_buffers_in_shared_memory(layout: str) -> None:
    layers = (x for _ in range(8) for x in (nn.Linear(128, 128, bias=False), nn.GELU()))
    model = nn.Sequential(*layers)
    step = tutti.distribute(train_mlp, model, torch.optim.SGD(model.parameters(), 0.1), layout)
    program = step.program_of((torch.ones(512, 128),))

    def peak(word: str) -> int:
        program.layout = Layout.parse(f"{layout} remat={word}")
        return predict(program).peak_nbytes

    nbytes = (peak("none") + peak("full")) // 2
    assert peak(f"{nbytes / 1000:.3f}kB") <= nbytes < peak("none")


@pytest.mark.parametrize(
    "layout", ["micro=2", "data=2 micro=2", "data=2 zero=3 micro=2", "pipe=2 micro=4"]
)
def test_a_budget_of_bytes_counts_micro_batches_and_stages(layout: str) -> None:
    """Sums over micro-batches, buffers in shared memory, the micro-batches under way in a stage."""
    step, batch = prepared(layout, deep_gpt())
    program = step.program_of(batch)

    def peak(word: str) -> int:
        program.layout = Layout.parse(f"{layout} remat={word}")
        return predict(program).peak_nbytes

    whole, least = peak("none"), peak("full")
    nbytes = (whole + least) // 2
    assert least < peak(f"{nbytes / 1000:.3f}kB") <= nbytes < whole
    with pytest.raises(LayoutError, match=r"at least .*B at the peak"):
        peak("1kB")


@pytest.mark.parametrize("layout", ["data=2 micro=2", "pipe=2 micro=4"])
def test_a_budget_of_bytes_keeps_the_numbers_of_micro_batches(layout: str) -> None:
    train_step, model, optimizer, batches = deep_gpt()
    words = f"{layout} remat=400kB"  # between none and full
    assert tutti.verify(train_step, model, optimizer, batches[0], words).ok


def _target(program: Program) -> Target:
    return Target(donated=frozenset(program.captured.updated))


@pytest.mark.parametrize(
    ("word", "said"), [("10kB", "at least .*B at the peak"), ("0.001", "0\\.")]
)
def test_a_budget_that_is_too_small_names_the_least(word: str, said: str) -> None:
    program = one_layer()
    program.layout = Layout.parse(f"remat={word}")
    with pytest.raises(LayoutError, match=said) as caught:
        predict(program)
    fix = caught.value.fix.split(" ")[0]
    program.layout = Layout.parse(fix)
    predict(program)  # what the message offers works


def test_reductions_over_ranks_are_not_repeated_and_weights_gathered_once_for_the_backward() -> (
    None
):
    for layout in ("data=2 zero=3 remat=full", "data=2 tensor=2 remat=full"):
        program = subjects.program("gpt", layout)
        found = []
        for without in ({"remat"}, set[str]()):
            graph = optimized(program, Target(), without=without)
            found.append([n for n in graph.nodes if n.target in collectives.COLLECTIVES])
        before, after = found
        gathers = [n for n in after if n.target is collectives.all_gather]
        assert len(after) - len(before) == len(gathers) - sum(
            n.target is collectives.all_gather for n in before
        )
        # Only what the backward itself has no use for: biases.
        more = len(after) - len(before)
        num_biases = sum(s.name.endswith("bias") for s in program.captured.state)
        assert 0 <= more <= num_biases


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(1, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(nn.functional.gelu(self.conv(x[:, None])).flatten(1))


def test_a_value_of_both_passes_moves_before_what_it_reads() -> None:
    """The backward divides by a norm of a split weight as the forward does: once, before its first reader."""
    model = Filters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = {"*original1": "-, -, tensor"}
    batch = (torch.linspace(-1, 1, 48).reshape(3, 16),)
    assert tutti.verify(train_mlp, model, optimizer, batch, "tensor=2 remat=full", place=place).ok


def test_evaluation_has_nothing_to_recompute() -> None:
    program = subjects.program("eval", "remat=full")
    graph = optimized(program, Target())
    assert len(graph.nodes) == len(optimized(program, Target(), without={"remat"}).nodes)


def look_up(model: nn.Module, optimizer: Any, tokens: Tensor) -> Tensor:
    loss = model(tokens).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(("rows", "times"), [(8, 1), (64, 2)])
def test_an_embedding_is_not_gathered_for_fewer_rows(rows: int, times: int) -> None:
    """The backward keeps the rows that a rank looks up, or gathers the 32 rows of the weight again."""
    model = nn.Sequential(nn.Embedding(32, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.distribute(look_up, model, optimizer, "data=2 zero=3 remat=full")
    program = step.program_of((torch.arange(2 * rows) % 32,))
    graph = ready_to_split(program, Target(), ())
    gathers = [n for n in graph.nodes if n.target is collectives.all_gather]
    assert sum(n.meta["val"].shape == (32, 8) for n in gathers) == times
