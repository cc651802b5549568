"""Random ops made of tutti's own numbers: as eager on ranks, and of the distribution that they name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Beta, Categorical, Dirichlet, Gamma, Normal, StudentT

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import losing_output
from ranks import Ranks
from tutti.capture.second_trace.random_ops import OurRandomness
from tutti.errors import CaptureError

NUM = 20_000


of = functools.partial(losing_output, width=6)


def policy() -> Program:
    """REINFORCE: an action for each row, and its log probability."""

    def loss(z: Tensor) -> Tensor:
        actions = Categorical(logits=z)
        taken = actions.sample()
        return -(actions.log_prob(taken) * taken).mean()

    return of(loss)


def continuous_policy() -> Program:
    def loss(z: Tensor) -> Tensor:
        actions = Normal(z[:, :3], z[:, 3:].exp())
        taken = actions.sample()
        return -(actions.log_prob(taken) * taken).mean()

    return of(loss)


def several_samples() -> Program:
    """With and without replacement, and of a vector."""

    def loss(z: Tensor) -> Tensor:
        weights = z.detach().softmax(-1)
        apart, again = (
            torch.multinomial(weights, 3),
            torch.multinomial(weights, 9, replacement=True),
        )
        one = torch.multinomial(torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 0.0]), 2)
        return z.gather(1, apart).mean() + z.gather(1, again).square().mean() + z[:, one].mean()

    return of(loss)


def drawn_in_place() -> Program:
    def loss(z: Tensor) -> Tensor:
        noise = torch.empty_like(z)
        scale = noise.cauchy_().clamp(-2, 2) + noise.log_normal_() + noise.geometric_(0.3)
        return (z * scale * torch.normal(z.detach(), 0.5)).mean()

    return of(loss)


def mixup() -> Program:
    """One share for the batch, one for each row, and shapes that the model makes, with gradients."""

    def loss(z: Tensor) -> Tensor:
        share = Beta(0.2, 0.2).sample()
        rows = Beta(torch.tensor(0.8), torch.tensor(3.0)).sample((8,)).unsqueeze(1)
        mixed = share * z + (1 - share) * z.flip(0) + rows * z
        shapes = z.exp()
        made = Gamma(shapes, 2.0).rsample() + Dirichlet(shapes).rsample()
        return (mixed * made).square().mean() + (z * StudentT(3.0).sample(z.shape)).mean()

    return of(loss)


@pytest.mark.parametrize(
    "name", ["policy", "continuous_policy", "several_samples", "drawn_in_place", "mixup"]
)
def test_ranks_draw_the_numbers_of_one_device(ranks: Ranks, name: str) -> None:
    program: Callable[[], Program] = globals()[name]
    assert_as_eager(program)
    assert_as_eager_on_ranks(ranks, program, "data=2 zero=3")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replacement", [True, False])
def test_categories_come_as_often_as_their_weights_say(
    dtype: torch.dtype, replacement: bool
) -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=dtype)
    with OurRandomness(0, 0):
        if replacement:
            found = torch.multinomial(weights, NUM, replacement=True)
        else:
            found = torch.multinomial(weights.expand(NUM, 4), 1)
    share = torch.bincount(found.flatten(), minlength=4) / NUM
    assert share[0] == 0
    torch.testing.assert_close(share, torch.tensor([0.0, 0.125, 0.25, 0.625]), atol=0.015, rtol=0)


def test_without_replacement_no_category_comes_twice() -> None:
    with OurRandomness(1, 0):
        found = torch.multinomial(torch.tensor([1.0, 2.0, 4.0]).expand(NUM, 3), 2)
    assert (found[:, 0] != found[:, 1]).all()
    both = torch.bincount(found[:, 0] * 3 + found[:, 1], minlength=9) / NUM
    # p(i, j) = w_i / sum * w_j / (sum - w_i)
    expected = {(0, 1): 2 / 42, (0, 2): 4 / 42, (1, 0): 2 / 35, (1, 2): 8 / 35, (2, 0): 4 / 21}
    for (i, j), share in expected.items():
        assert float(both[3 * i + j]) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("draw", "quantiles"),
    [
        (lambda x: x.cauchy_(1.0, 2.0), (-1.0, 1.0, 3.0)),
        (lambda x: x.log_normal_(0.5, 1.0), (0.8399, 1.6487, 3.2364)),
        (lambda x: torch.normal(x.fill_(3.0), x * 0 + 2.0), (1.651, 3.0, 4.349)),
        (lambda x: torch.normal(1.0, x.fill_(2.0)), (-0.349, 1.0, 2.349)),
    ],
)
def test_quartiles(draw: Callable[[Tensor], Tensor], quantiles: tuple[float, ...]) -> None:
    with OurRandomness(2, 0):
        found = draw(torch.empty(NUM, dtype=torch.float64))
    at = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    expected = torch.tensor(quantiles, dtype=torch.float64)
    torch.testing.assert_close(found.quantile(at), expected, atol=0.12, rtol=0)


@pytest.mark.parametrize("shape", [0.05, 0.4, 1.0, 1.5, 30.0])
def test_gamma_variables_have_its_distribution(shape: float) -> None:
    """P(X <= x) of the values is uniform: a larger gap (Kolmogorov, Smirnov) comes once in 1e6 times."""
    a = torch.full((NUM,), shape, dtype=torch.float64)
    with OurRandomness(4, 0):
        found = Gamma(a, 1.0).sample()
    assert found.min() > 0
    share = torch.special.gammainc(a, found).sort().values
    ends = torch.arange(NUM + 1, dtype=torch.float64) / NUM
    gap = torch.maximum(share - ends[:-1], ends[1:] - share).max()
    assert gap < 2.7 / NUM**0.5


def test_gamma_variables_of_neighbors_are_independent() -> None:
    with OurRandomness(5, 0):
        found = Gamma(torch.full((NUM, 3), 0.7, dtype=torch.float64), 1.0).sample().sqrt()
    assert torch.corrcoef(found.T).triu(1).abs().max() < 0.03


@pytest.mark.parametrize("shape", [1e-3, 0.3, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_a_dirichlet_distribution(shape: float, dtype: torch.dtype) -> None:
    """E[x] = 1 / n and Var[x] = (n - 1) / (n^2 (n a + 1)) for n equal parameters a."""
    with OurRandomness(6, 0):
        found = Dirichlet(torch.full((3,), shape, dtype=dtype)).sample((NUM,))
    assert found.dtype == dtype and found.isfinite().all() and found.min() > 0
    torch.testing.assert_close(found.sum(-1), torch.ones(NUM, dtype=dtype))
    mean, spread = found.double().mean(0), found.double().var(0)
    assert mean == pytest.approx([1 / 3] * 3, abs=0.015)
    assert spread == pytest.approx([2 / 9 / (3 * shape + 1)] * 3, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_trials_up_to_a_success(dtype: torch.dtype) -> None:
    with OurRandomness(3, 0):
        found = torch.empty(NUM, dtype=dtype).geometric_(0.25)
        assert (torch.empty(5).geometric_(1.0) == 1).all()
    assert found.dtype == dtype
    assert found.min() == 1
    for k in (1, 2, 3):
        assert float((found == k).double().mean()) == pytest.approx(
            0.25 * 0.75 ** (k - 1), abs=0.015
        )


def without_generator() -> Program:
    """As diffusers' `randn_tensor` calls it, and the forms of other factories."""

    def loss(z: Tensor) -> Tensor:
        noise = torch.randn(z.shape, generator=None, dtype=z.dtype)
        order = torch.randperm(6, generator=None)
        steps = torch.randint(0, 9, z.shape, generator=None) + torch.randint(
            5, (8, 1), generator=None
        )
        kept = torch.rand(z.shape, generator=None) < 0.5
        wide = torch.normal(1.0, 2.0, z.shape, generator=None)
        return (z[:, order] * noise * kept + steps * z + wide * z.square()).mean()

    return of(loss)


def test_no_generator_is_the_default_one(ranks: Ranks) -> None:
    assert_as_eager(without_generator)
    assert_as_eager_on_ranks(ranks, without_generator, "data=2 zero=3")


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    r"torch\.poisson \(torch\.distributions\.Poisson\)": lambda z: torch.poisson(z.exp()),
    r"torch\.binomial \(torch\.distributions\.Binomial\)": lambda z: torch.binomial(
        z * 0 + 9, z.sigmoid()
    ),
    r"x\.random_\(\) without bounds": lambda z: torch.empty_like(z).random_(),
    "rrelu in training": lambda z: torch.rrelu(z, training=True),
}


@pytest.mark.parametrize("said", REFUSED)
def test_other_distributions_are_refused_with_the_line(said: str) -> None:
    def loss(z: Tensor) -> Tensor:
        drawn = REFUSED[said](z.detach())
        return (z * drawn).mean()

    step, model, optimizer, batch = of(loss)
    with pytest.raises(CaptureError, match=f"^{said} in the step is not supported") as refused:
        tutti.distribute(step, model, optimizer)(*batch)
    assert "lambda z: torch" in refused.value.at
    assert "draw them before the step, and hand them over" in refused.value.fix


DRAWS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "randn": lambda z, g: torch.randn(z.shape, generator=g),
    "randint": lambda z, g: torch.randint(9, z.shape, generator=g),
    "bernoulli": lambda z, g: torch.bernoulli(z.sigmoid(), generator=g),
    "multinomial": lambda z, g: torch.multinomial(z.softmax(-1), 1, generator=g),
    "uniform_": lambda z, g: torch.empty_like(z).uniform_(generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_that_is_seeded_at_every_call_is_refused(name: str) -> None:
    """Else its numbers would differ from call to call, where they are the same in eager PyTorch.

    The tracer of PyTorch 2.11 refuses the argument itself.
    """
    generator = torch.Generator()

    def loss(z: Tensor) -> Tensor:
        return (z * DRAWS[name](z.detach(), generator.manual_seed(3))).mean()

    step, model, optimizer, batch = of(loss)
    by_us = f"{name}.* draws from a generator that the step passes"
    with pytest.raises(CaptureError, match=f"{by_us}|argument of type: .*Generator") as refused:
        tutti.distribute(step, model, optimizer)(*batch)
    assert "leave `generator` out" in str(refused.value)
    assert "test_random_ops.py" in str(refused.value)
    if "from a generator" in str(refused.value):
        assert "lambda z, g:" in refused.value.at
