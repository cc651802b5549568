"""PyTorch's random ops, in terms of `draw`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.capture.patch_table import RNG_STATES
from tutti.capture.second_trace import attention_dropout
from tutti.capture.second_trace.gammas import dirichlet, standard_gamma
from tutti.errors import CaptureError
from tutti.graph.edits.patch import replaced
from tutti.graph.randomness import random
from tutti.graph.randomness.draw import drawn
from tutti.torch_private.dispatch_modes import TorchDispatchMode
from tutti.torch_private.op_tables import OpOverload, schema_of

aten = torch.ops.aten
# draw(kind, shape, params, dtype, device)
Draw = Callable[..., Tensor]


def _like(
    draw: Draw, kind: str, x: Tensor, *params: float, dtype: torch.dtype | None = None
) -> Tensor:
    return draw(kind, list(x.shape), [float(p) for p in params], dtype or x.dtype, x.device)


def _new(
    draw: Draw, kind: str, size: Any, *params: float, whole: bool = False, **kw: Any
) -> Tensor:
    dtype = kw.get("dtype") or (torch.int64 if whole else torch.get_default_dtype())
    device = torch.device(kw.get("device") or "cpu")
    return draw(kind, list(size), [float(p) for p in params], dtype, device)


def _dropout(draw: Draw, x: Tensor, p: float, train: bool | None = None, **_: Any) -> Any:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _like(draw, "bernoulli", x, 1 - p, dtype=torch.bool)
    return x * mask * (0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def _bernoulli_tensor(draw: Draw, x: Tensor, p: Tensor) -> Tensor:
    return (_like(draw, "uniform", x, 0, 1, dtype=torch.float32) < p).to(x.dtype)


def _exponential(draw: Draw, x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    """By inversion: -log(1 - u) / rate, u uniform in [0, 1)."""
    return _like(draw, "uniform", x, 0, 1).neg().log1p().div(-rate)


def _normal(draw: Draw, mean: Tensor | float, std: Tensor | float = 1.0, **_: Any) -> Tensor:
    """Of means or standard deviations that are tensors."""
    both = mean * std
    assert isinstance(both, Tensor)
    return _like(draw, "normal", both, 0, 1) * std + mean


def _log_normal(draw: Draw, x: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return _like(draw, "normal", x, mean, std).exp()


def _cauchy(draw: Draw, x: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Tensor:
    """By inversion."""
    return (_like(draw, "uniform", x, 0, 1) - 0.5).mul(math.pi).tan().mul(sigma).add(median)


def _geometric(draw: Draw, x: Tensor, p: float, **_: Any) -> Tensor:
    """By inversion: the number of trials up to the first success."""
    if p == 1:
        return torch.ones_like(x)
    dtype = x.dtype if x.dtype.is_floating_point else torch.float32
    u = _like(draw, "uniform", x, 0, 1, dtype=dtype)
    return u.neg().log1p().div(math.log1p(-p)).ceil().clamp(min=1).to(x.dtype)


def _multinomial(
    draw: Draw, weights: Tensor, num: int, replacement: bool = False, **_: Any
) -> Tensor:
    """As an exponential race, by which PyTorch samples, too: the least `time / weight` wins.

    Without replacement the first `num` in time; with it one race for each sample.
    """
    wide = weights if weights.dtype == torch.float64 else weights.float()
    many = replacement and num > 1
    if many:
        wide = wide.unsqueeze(-2).expand(*weights.shape[:-1], num, weights.shape[-1])
    times = _exponential(draw, wide).clamp(min=torch.finfo(wide.dtype).tiny)  # 0 / 0 would win
    score = wide / times
    if many:
        return score.argmax(-1)
    return score.argmax(-1, keepdim=True) if num == 1 else score.topk(num, -1).indices


# Functional forms: op -> (draw, *args, **kwargs) -> value
_VALUES: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: lambda d, x, p=0.5, **k: _like(d, "bernoulli", x, p),
    aten.bernoulli.default: lambda d, x, **k: _bernoulli_tensor(d, x, x),
    aten.bernoulli.Tensor: lambda d, x, p, **k: _bernoulli_tensor(d, x, p),
    aten.rand.default: lambda d, size, **k: _new(d, "uniform", size, 0, 1, **k),
    aten.rand_like.default: lambda d, x, **k: _like(d, "uniform", x, 0, 1, dtype=k.get("dtype")),
    aten.randn.default: lambda d, size, **k: _new(d, "normal", size, 0, 1, **k),
    aten.randn_like.default: lambda d, x, **k: _like(d, "normal", x, 0, 1, dtype=k.get("dtype")),
    aten.randint.default: lambda d, high, size, **k: _new(
        d, "randint", size, 0, high, whole=True, **k
    ),
    aten.randint.low: lambda d, low, high, size, **k: _new(
        d, "randint", size, low, high, whole=True, **k
    ),
    aten.randint_like.default: lambda d, x, high, **k: _like(
        d, "randint", x, 0, high, dtype=k.get("dtype")
    ),
    aten.randint_like.low_dtype: lambda d, x, low, high, **k: _like(
        d, "randint", x, low, high, dtype=k.get("dtype")
    ),
    aten.randperm.default: lambda d, n, **k: _new(d, "permutation", [n], whole=True, **k),
    aten.uniform.default: lambda d, x, low=0.0, high=1.0, **k: _like(d, "uniform", x, low, high),
    aten.exponential.default: _exponential,
    aten.multinomial.default: _multinomial,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.float_float: lambda d, mean, std, size, **k: _new(
        d, "normal", size, mean, std, **k
    ),
    aten.log_normal.default: _log_normal,
    aten.cauchy.default: _cauchy,
    aten.geometric.default: _geometric,
    aten._standard_gamma.default: standard_gamma,
    aten._sample_dirichlet.default: dirichlet,
    aten.normal_functional.default: lambda d, x, mean=0.0, std=1.0, **k: _like(
        d, "normal", x, mean, std
    ),
}
# The overloads of calls with `generator=None`, as in diffusers' `randn_tensor`.
_VALUES |= {
    aten.rand.generator: _VALUES[aten.rand.default],
    aten.randn.generator: _VALUES[aten.randn.default],
    aten.randint.generator: _VALUES[aten.randint.default],
    aten.randint.low_generator: _VALUES[aten.randint.low],
    aten.randperm.generator: _VALUES[aten.randperm.default],
}
# In-place forms: the value overwrites the first argument.
_OVERWRITES: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: _VALUES[aten.bernoulli.p],
    aten.bernoulli_.Tensor: _VALUES[aten.bernoulli.Tensor],
    aten.exponential_.default: _exponential,
    aten.log_normal_.default: _log_normal,
    aten.cauchy_.default: _cauchy,
    aten.geometric_.default: _geometric,
    aten.uniform_.default: _VALUES[aten.uniform.default],
    aten.normal_.default: _VALUES[aten.normal_functional.default],
    aten.random_.to: lambda d, x, to, **k: _like(d, "randint", x, 0, to),
    getattr(aten.random_, "from"): lambda d, x, low, to, **k: _like(d, "randint", x, low, to),
}

# The fix for a draw from a generator that the step passes.
NO_GENERATOR = (
    "leave `generator` out, or draw the numbers before the step and hand them over as arguments"
)
# Random ops without an answer, as users write them; others by their own names.
_IN_WORDS = {
    aten.poisson.default: "torch.poisson (torch.distributions.Poisson)",
    aten.binomial.default: "torch.binomial (torch.distributions.Binomial)",
    aten.random_.default: "x.random_() without bounds",
    aten.rrelu_with_noise.default: "rrelu in training",
}
RANDOM_OPS = frozenset(_VALUES) | frozenset(_OVERWRITES)


def is_random(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws numbers that `answer` can give."""
    return op in RANDOM_OPS or attention_dropout.draws(op, args, kwargs)


def answer(draw: Draw, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of random op `op`, its random values taken from `draw`."""
    if op not in RANDOM_OPS:

        def bernoulli(shape: Any, p: float, device: torch.device) -> Tensor:
            return draw("bernoulli", shape, [p], torch.bool, device)

        return attention_dropout.forward(bernoulli, op, args, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
    if op in _VALUES:
        return _VALUES[op](draw, *args, **kwargs)
    return args[0].copy_(_OVERWRITES[op](draw, *args, **kwargs))


def refused_draw(op: OpOverload, line: str) -> CaptureError:
    """The error for a random op that has no answer, at the user's `line`."""
    name = schema_of(op).name.removeprefix("aten::")
    return CaptureError(
        f"{_IN_WORDS.get(op, name)} in the step is not supported",
        at=line,
        why="the numbers of a step do not depend on its layout, and tutti has none of this distribution",
        fix="draw them before the step, and hand them over as an argument; or build them from torch.rand, "
        "randn, randint, bernoulli, torch.distributions.Gamma or Beta",
    )


class Counter(Protocol):
    """A count of the random ops of a step so far."""

    num_streams: int


@contextlib.contextmanager
def rewinding(counter: Counter) -> Iterator[None]:
    """Code that saves and restores the random state (checkpointing) rewinds the stream count instead."""

    def get_state() -> int:
        return counter.num_streams

    def set_state(state: Any) -> None:
        counter.num_streams = state

    both = get_state, set_state
    with replaced(*(pair for row in RNG_STATES for pair in zip(row, both, strict=True))):
        yield


class OurRandomness(TorchDispatchMode):
    """Inside, eager code draws the numbers of the captured step of (seed, step)."""

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()
        self.seed, self.step, self.num_streams = seed, step, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            if attention_dropout.has_dropout(func, args, kwargs):
                return attention_dropout.backward(func, args, kwargs)
            return func(*args, **kwargs)
        key = random.key(self.seed, self.num_streams, self.step)
        self.num_streams += 1

        def draw(kind: str, shape: Any, params: Any, dtype: Any, device: Any) -> Tensor:
            index = [torch.arange(n) for n in shape]
            return drawn(kind, params, dtype, device, key, index, shape)

        return answer(draw, func, args, kwargs)
