"""Expert parallelism of Hugging Face's mixtures: the numbers of one device, two all-to-alls a direction."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tutti
from captured_once import captured_once
from mixtures import (
    EXPERTS,
    LENGTH,
    NAMES,
    NUM_LAYERS,
    SAMPLES,
    TOP,
    WIDTH,
    arguments,
    mixture,
    points,
    points_step,
    routed,
    tokens,
    train_step,
)
from ranks import Ranks
from tutti.capture.captured import copied
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.planner.placement.placement import Placement, find_place
from tutti.propagate.plan import plan
from tutti.report.collective_records import records
from tutti.verification.verdict import Subject, Verdict

PLACE = {"*.experts.gate_up_proj": "expert, -, -", "*.experts.down_proj": "expert, -, -"}
ATTENTION = dict.fromkeys((f"*.{name}_proj.weight" for name in "qkv"), "tensor, -")
ATTENTION |= {"*.o_proj.weight": "-, tensor"}
NUM_ROWS = SAMPLES * LENGTH * TOP


# What the search finds; a program of other layouts is given its place.
SEARCHED = [(name, "expert=2") for name in NAMES]
SEARCHED += [("Qwen3-MoE", "data=2 expert=4"), ("DeepSeek-V3", "expert=2 tensor=2")]


@cache
def subject(name: str, precision: str = "fp32") -> Subject:
    """The step captured, and compared with the eager one, for all layouts."""
    return Subject(*arguments(name), precision=precision)


@cache
def found(name: str, layout: str) -> Placement:
    return find_place(subject(name).captured, Layout.parse(layout))


@cache
def program(name: str, layout: str) -> Program:
    """With the place that the search finds, or with `PLACE`."""
    if (name, layout) not in SEARCHED:
        return placed(name, layout, PLACE)
    made = found(name, layout)
    graph, seeds = copied(subject(name).captured), {"found": made.place, "words": made.words}
    return partition(plan(graph, Layout.parse(layout), **seeds))


def placed(name: str, layout: str, place: dict[str, str]) -> Program:
    parsed = Layout.parse(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a batch that does not divide
        return subject(name, parsed.precision).program(parsed, place)


def verdict(name: str, made: Program) -> Verdict:
    return subject(name, made.layout.precision).verdict(made.layout, program=made)


def moved(made: Program) -> Counter[tuple[str, str, bool]]:
    """Collectives of forward and backward on more than numbers: region, kind, whether of floats."""
    found: Counter[tuple[str, str, bool]] = Counter()
    for node in made.collectives:
        region, val = node.meta["user"].meta.get("region"), node.meta["val"]
        if region in ("forward", "backward") and val.ndim:
            found[region, node.target.__name__, val.is_floating_point()] += 1  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["expert=2", "data=2 expert=2", "expert=4"])
def test_two_all_to_alls_a_layer_and_direction(name: str, layout: str) -> None:
    """One more, of integers, tells the experts of the slots; nothing else moves, and nothing is gathered."""
    layers = NUM_LAYERS[name]
    assert moved(program(name, layout)) == {
        ("forward", "all_to_all", True): 2 * layers,
        ("forward", "all_to_all", False): layers,
        ("backward", "all_to_all", True): 2 * layers,
    }


def test_bytes_of_evenly_chosen_experts() -> None:
    """Of the rows of a rank, in each all-to-all those of the other ranks; integers for them are 8 bytes."""
    made = program("Mixtral", "data=2 expert=2")
    sent = [r for r in records(made) if r.kind == "all_to_all"]
    rows = NUM_ROWS // 4 // 2
    assert [r.nbytes for r in sent if r.dtype == "f32"] == [rows * WIDTH * 4] * 8
    assert [r.nbytes for r in sent if r.dtype == "i64"] == [rows * 8] * 2


def test_ranks_that_share_a_batch_take_their_rows_of_it() -> None:
    """8 ranks for 4 samples: the ranks of `expert` have the same ones, and add up what their experts give."""
    made = program("Mixtral", "data=4 expert=2")
    assert moved(made) == {
        ("forward", "all_reduce", True): 2,
        ("backward", "all_reduce", True): 2,
    }


def test_weights_that_are_split_otherwise_do_not_move_rows() -> None:
    made = placed("Mixtral", "expert=2", {"*.experts.*_proj": "-, expert, -"})
    assert not [n for n in made.collectives if n.target.__name__ == "all_to_all"]  # type: ignore[union-attr]
    assert made.plan.samples["batch.0"].is_whole


def test_a_wrong_entry_for_experts_is_named() -> None:
    with pytest.raises(
        tutti.ShardingError, match=r'at   place\["\*\.experts\.\*"\] for .*gate_up_proj'
    ):
        placed("Mixtral", "expert=2", {"*.experts.*": "exprt, -, -"})


def test_experts_split_over_two_axes_add_up() -> None:
    """Rows stay: each rank multiplies those of its experts, and the sum over ranks has all."""
    place = {
        "*.experts.gate_up_proj": "expert+tensor, -, -",
        "*.experts.down_proj": "expert+tensor, -, -",
    }
    made = verdict("Mixtral", placed("Mixtral", "expert=2 tensor=2", place))
    assert made.ok and made.max_error < 1e-9, str(made)


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "data=2 expert=2") for name in NAMES), *SEARCHED]
)
def test_the_same_step_in_float64(name: str, layout: str) -> None:
    made = verdict(name, program(name, layout))
    assert made.ok and made.max_error < 1e-9, str(made)


@pytest.mark.parametrize(
    "layout",
    [
        "expert=4 tensor=2",
        "data=2 expert=2 zero=3",
        "expert=2 micro=2",
        "data=2 expert=2 pipe=2 micro=2",
        "expert=2 seq=2",
        "data=4 expert=2",
        "expert=2 remat=full",
        "data=2 expert=2 zero=3 precision=bf16",
    ],
)
def test_with_other_words(layout: str) -> None:
    place = PLACE | ATTENTION if "tensor" in layout else PLACE
    made = verdict("Mixtral", placed("Mixtral", layout, place))
    assert made.ok and made.max_error < 1e-9, str(made)


@pytest.mark.parametrize(("name", "layout"), SEARCHED)
def test_the_search_splits_the_experts(name: str, layout: str) -> None:
    made = found(name, layout)
    assert {p: text for p, text in made.place.items() if ".experts." in p} == {
        "model.layers.*.mlp.experts.gate_up_proj": "expert, -, -",
        "model.layers.*.mlp.experts.down_proj": "expert, -, -",
    }
    assert made.words[0].startswith("mixture of experts: experts over expert (")
    assert made.seconds < made.whole_seconds


def _trained(model: Any, step: Any, batches: list[Any]) -> dict[str, Any]:
    """The losses, weights and second moments after a step on each batch, and the bytes of experts here."""
    losses = [float(step(*batch)) for batch in batches]
    held = sum(_local(p).nbytes for n, p in model.named_parameters() if p.ndim == 3)
    with tutti.whole(model):
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "weights": weights, "experts": held}


def _adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)


def _moments(model: Any, optimizer: Any) -> list[Tensor]:
    return [_whole(optimizer.state[p]["exp_avg_sq"]) for p in model.parameters()]


def _local(p: Any) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def case(name: str, experts: str) -> tuple[Any, Any, list[Any]]:
    """A step's function, model and batches, in float64."""
    if name == "Routed":
        return points_step, routed(), [points(k) for k in range(3)]
    return train_step, mixture(name, experts).double(), [(tokens(k),) for k in range(3)]


def played_before() -> tuple[dict[str, Any], list[float]]:
    """What one device gives: each model in plain PyTorch, with Hugging Face's loop over experts.

    Its steps are captured for ranks that are copies of this process.
    """
    want = {}
    for name in ("Routed", *NAMES):
        function, model, batches = case(name, "eager")
        optimizer = _adam(model)
        want[name] = _trained(model, partial(function, model, optimizer), batches)
        want[name]["moments"] = _moments(model, optimizer)
        function, model, batches = case(name, "batched_mm")
        with captured_once(name):
            tutti.distribute(function, model, _adam(model), "")(*batches[0])
    return want, evaluated("")


def on_rank(name: str, layout: str, place: dict[str, str] | None) -> dict[str, Any]:
    """Three steps of a model."""
    function, model, batches = case(name, "batched_mm")
    optimizer = _adam(model)
    with captured_once(name):
        step = tutti.distribute(function, model, optimizer, layout, place=place)
        made = _trained(model, step, batches)
    return made | {"moments": _moments(model, optimizer)}


@pytest.mark.parametrize(
    ("name", "layout", "n", "place"),
    [
        ("Routed", "expert=2", 2, None),
        ("Routed", "data=2 expert=2", 4, None),
        ("Mixtral", "data=2 expert=2", 4, PLACE),
        ("Qwen3-MoE", "expert=2", 2, PLACE),
        ("DeepSeek-V3", "expert=2", 2, None),
    ],
)
def test_real_ranks_train_as_one_device(
    name: str, layout: str, n: int, place: dict[str, str] | None, ranks: Ranks
) -> None:
    """Half of the experts on a rank; losses, weights and second moments equal those of one device.

    Hugging Face's models compute norms, routers and losses in float32 whatever their dtype: values equal to
    the last bit of float64 may round apart there by 1e-7.
    """
    near = 1e-12 if name == "Routed" else 1e-6
    before = ranks.after(played_before)
    want = before.result[0][name]
    for made in before.run(on_rank, name, layout, place, n=n):
        assert made["losses"] == pytest.approx(want["losses"], rel=near)
        for key, value in want["weights"].items():
            torch.testing.assert_close(made["weights"][key], value, rtol=near, atol=near / 10)
        for have, value in zip(made["moments"], want["moments"], strict=True):
            torch.testing.assert_close(have, value, rtol=10 * near, atol=near * near)
        assert made["experts"] * 2 == want["experts"]


def evaluate(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(x), y)


def evaluated(layout: str) -> list[float]:
    """Losses of training, of evaluations on the same model, and of batches that two ranks cannot divide."""
    model = routed()
    if not layout:
        step, test = partial(points_step, model, _adam(model)), partial(evaluate, model)
    else:
        step = tutti.distribute(points_step, model, _adam(model), layout)
        test = tutti.distribute(evaluate, model, layout=layout)
    x, y = points(5)
    found = [step(*points(1)), test(x, y), step(x[:7], y[:7]), test(x[:1], y[:1]), step(*points(2))]
    return [float(loss) for loss in found]


def test_evaluations_and_uneven_batches(ranks: Ranks) -> None:
    """Rows that do not divide by `expert` are shared: each of its ranks takes those of its experts."""
    before = ranks.after(played_before)
    for losses in before.run(evaluated, "expert=2", n=2):
        assert losses == pytest.approx(before.result[1], rel=1e-12)


def numbers_moved(favorite: int | None) -> list[int]:
    """The numbers that each all-to-all of two ranks takes on this rank, in one step of `Routed`."""
    taken: list[int] = []
    exchanged = ProcessGroups.exchanged

    def counted(self: Any, xs: Any, axes: Any) -> Any:
        taken.extend(x.numel() for x in xs)
        return exchanged(self, xs, axes)

    model = routed()
    if favorite is not None:  # every row goes to this expert and the next one, of one rank
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.router = Favorites(favorite)
    step = tutti.distribute(points_step, model, _adam(model), "expert=2")
    program = "Routed" if favorite is None else "favorites"
    with mock.patch.object(ProcessGroups, "exchanged", counted), captured_once(program):
        step(*points())
    return taken


class Favorites(torch.nn.Module):
    """Prefers one expert and the next one."""

    def __init__(self, favorite: int) -> None:
        super().__init__()
        self.register_buffer("scores", torch.zeros(EXPERTS, dtype=torch.float64))
        self.scores[favorite : favorite + 2] = 9.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scores + 0 * x[:, :EXPERTS]


def test_ranks_move_as_many_slots_as_the_fullest_block_has(ranks: Ranks) -> None:
    """16 points of two experts on each rank: 32 slots a block, which only one-sided choices fill.

    The batch needs no gradient: the first of two layers returns none.
    """
    full = [2 * 32 * WIDTH] * 7 + [2 * 32] * 2
    before = ranks.after(played_before)
    for taken in before.run(numbers_moved, 2, n=2):
        assert sorted(taken) == sorted(full)
    for taken in before.run(numbers_moved, None, n=2):
        assert len(taken) == 9 and sum(taken) < 0.8 * sum(full)
