"""Every contender trains the same model on the same data: the losses of its first steps say so.

The third loss depends on two updates, so a contender with other hyper-parameters, another average of the
gradients or another part of the batch is found.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.contenders.contender import Batches, Place, Way
from benchmarks.contenders.eager import Eager
from benchmarks.models import Case, optimizer
from benchmarks.ways import WAYS
from benchmarks.worker import steps
from captured_once import captured_once
from ranks import Ranks
from tests.benchmarks.tiny import GPT, LLAMA, PIPE, RESNET

NUM_STEPS = 3
TOLERANCE = 5e-6  # of float32 against float64
# BatchNorm has each rank's own statistics under the wrappers of torch: another step.
OWN_STATISTICS = ("ddp", "fsdp2")
REAL = [("gpt pipe" if way.pipelines else "gpt", name) for name, way in WAYS.items()]
REAL += [("llama", "dtensor"), ("llama", "jax")]
REAL += [("resnet", "jax"), ("resnet", "ddp")]
CASES: dict[str, Case] = {case.name: case for case in (GPT, PIPE, LLAMA, RESNET)}


@functools.cache
def expected(name: str, num_shares: int) -> list[float]:
    """The losses of plain PyTorch on one device, in float64, on the whole global batch."""
    case = CASES[name]
    model = case.model().double()
    update, found = optimizer(model), []
    for index in range(NUM_STEPS):
        inputs, targets = case.batch(index, num_shares)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        loss = case.loss(model, inputs, targets)
        update.zero_grad()
        loss.backward()
        update.step()
        found.append(loss.item())
    return found


def expected_of_own_statistics(case: Case, num_ranks: int) -> list[float]:
    """As `expected`, but each rank's part of the batch is normalized by itself."""
    model = case.model()
    update, found = optimizer(model), []
    for index in range(NUM_STEPS):
        parts = zip(*(x.chunk(num_ranks) for x in case.batch(index, num_ranks)), strict=True)
        loss = torch.stack([case.loss(model, *part) for part in parts]).mean()
        update.zero_grad()
        loss.backward()
        update.step()
        found.append(loss.item())
    return found


def losses_on_rank(case: Case, way: str) -> list[float]:
    """This rank's losses; the process group is that of the pool."""
    import torch.distributed as dist

    contender = WAYS[way].build(case, Place(dist.get_rank(), dist.get_world_size()))
    with captured_once(("contender", case.name)):
        return steps(contender, NUM_STEPS).losses


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled() -> Iterator[None]:
    """XLA reads the variable once: here a step takes much longer to compile than to run."""
    with mock.patch.dict(os.environ, {"XLA_FLAGS": "--xla_backend_optimization_level=0"}):
        yield


def losses(case: Case, way: Way, ranks: Ranks) -> list[float]:
    """The mean over the ranks of each step's loss."""
    if way.num_ranks > 1:
        found = ranks.run(losses_on_rank, case, way.name, n=way.num_ranks)
        return np.mean(found, axis=0).tolist()
    if way.name == "jax":
        way.prepare(Place(0, 1))
    return steps(way.build(case, Place(0, 1)), NUM_STEPS).losses


@pytest.mark.parametrize(("name", "way"), REAL)
def test_the_first_losses_are_those_of_one_device(name: str, way: str, ranks: Ranks) -> None:
    if way == "jax" and importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    case, chosen = CASES[name], WAYS[way]
    if name == "resnet" and way in OWN_STATISTICS:
        wanted = expected_of_own_statistics(case, chosen.num_ranks)
    else:
        wanted = expected(name, chosen.num_shares)
    np.testing.assert_allclose(losses(case, chosen, ranks), wanted, rtol=TOLERANCE)


def test_the_comparison_sees_another_learning_rate() -> None:
    """A tenth more."""
    model = GPT.model()
    update = optimizer(model)
    update.param_groups[0]["lr"] *= 1.1
    found = Eager(GPT, model, update, Batches(GPT, 1))
    assert (
        abs([found.step() for _ in range(NUM_STEPS)][-1] / expected("gpt", 1)[-1] - 1)
        > 10 * TOLERANCE
    )


def test_ways_that_are_compared_train_the_same_batch() -> None:
    for way in WAYS.values():
        if way.peer:
            assert WAYS[way.peer].num_shares == way.num_shares


def test_tensor_parallelism_applies_to_models_that_it_can_split() -> None:
    plain = [w for w in WAYS.values() if not w.pipelines]
    assert [w.name for w in plain if not w.applies_to(RESNET)] == ["dtensor", "tutti tensor=2"]
    assert all(w.applies_to(GPT) and w.applies_to(LLAMA) for w in plain)


def test_pipelines_have_cases_of_their_own() -> None:
    assert {w.name for w in WAYS.values() if w.applies_to(PIPE)} == {
        w.name for w in WAYS.values() if w.pipelines
    }
