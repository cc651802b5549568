"""Copies of optimizers on parameters with random values, for trial steps that keep the weights."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.second_trace.random_ops import OurRandomness, rewinding
from tutti.capture.state.first_step import inner_optimizers
from tutti.capture.state.lift import create_slots, place_counts
from tutti.capture.state.optimizer_copies import Memo, copied, optimizers_copied_whole
from tutti.capture.state.trial_steps import trial
from tutti.graph.players.device import device_of
from tutti.torch_private.optimizer_marks import hooks_off, remove_hooks

NUM_STEPS = 3
# The copies of a parameter with more elements have dims of at most this size.
MOST_ELEMENTS, LONGEST = 2**24, 2**12
SEED = 20_231


class StandIns:
    """A copy of an optimizer before its first step, on parameters of its own: one of each form.

    The copy of a parameter with more than `most_elements` has dims of at most `longest`.
    """

    def __init__(
        self, one: Optimizer, most_elements: int = MOST_ELEMENTS, longest: int = LONGEST
    ) -> None:
        self._most_elements, self._longest = most_elements, longest
        self._original = one
        self._draw = torch.Generator().manual_seed(SEED)
        memo = self._stand_ins(one)
        self.of: dict[int, nn.Parameter] = {**memo}  # by id of a parameter, its stand-in
        states = {id(x.state): x.state for x in inner_optimizers(one)}
        with optimizers_copied_whole():
            memo |= {
                i: defaultdict(dict, of_no_parameter(copied(x, memo))) for i, x in states.items()
            }
            self.optimizer: Any = copy.deepcopy(one, memo)
        for inner in inner_optimizers(self.optimizer):
            remove_hooks(inner)
            for group in inner.param_groups:
                group["params"][:] = list({id(p): p for p in group["params"]}.values())

    def _stand_ins(self, one: Optimizer) -> Memo:
        """By id of each parameter, its stand-in: one for all of one form in a group."""
        self.params: list[nn.Parameter] = []
        memo: Memo = {}
        of_form: dict[Any, nn.Parameter] = {}
        for inner in inner_optimizers(one):
            for g, group in enumerate(inner.param_groups):
                for p in (p for p in group["params"] if id(p) not in memo):
                    noted = [(k, v) for k, v in vars(p).items() if isinstance(v, str | int | float)]
                    form = (g, tuple(p.shape), p.dtype, p.device, p.requires_grad, *noted)
                    if form not in of_form:
                        of_form[form] = self._parameter(p)
                    memo[id(p)] = of_form[form]
        return memo

    def _parameter(self, p: Tensor) -> nn.Parameter:
        large = p.numel() > self._most_elements
        shape = [min(n, self._longest) for n in p.shape] if large else list(p.shape)
        made = nn.Parameter(values_like(shape, p, self._draw), p.requires_grad)
        for key, value in vars(p).items():
            setattr(made, key, value)
        self.params.append(made)
        return made

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        with trial(self._original), contextlib.ExitStack() as stack:
            for inner in inner_optimizers(self.optimizer):
                stack.enter_context(hooks_off(inner))
            yield

    @property
    def shared(self) -> list[set[Any]]:
        """The keys of the state that belong to no parameter."""
        return [{*of_no_parameter(x.state)} for x in inner_optimizers(self.optimizer)]

    def make_slots(self) -> None:
        """Make slots as `create_slots` does before a capture."""
        with self._trial(), OurRandomness(SEED, NUM_STEPS) as ours, rewinding(ours):
            create_slots(self.optimizer)
        for inner in inner_optimizers(self.optimizer):
            place_counts(inner)

    def after_steps(self, by_closure: bool) -> list[Any]:
        """All values after a few steps, which draw the random numbers of captured steps."""
        gradients = torch.Generator().manual_seed(SEED + 1)
        for k in range(NUM_STEPS):
            random.seed(k)
            np.random.seed(k)
            grads = [values_like(list(p.shape), p, gradients) for p in self.params]
            with self._trial(), OurRandomness(SEED, k) as ours, rewinding(ours):
                step_with(self.optimizer, self.params, grads, by_closure=by_closure)
        found: list[Any] = [[p.detach() for p in self.params]]
        for inner in inner_optimizers(self.optimizer):
            found.append([dict(inner.state.get(p, {})) for p in self.params])
            found.append(of_no_parameter(inner.state))
            found.append([_but(group, "params") for group in inner.param_groups])
            found.append(_but(vars(inner), "state", "param_groups", "defaults"))
        return found


def values_like(shape: list[int], like: Tensor, draw: torch.Generator) -> Tensor:
    """Random values of the dtype and device of `like`."""
    device = device_of(like)
    if not (like.is_floating_point() or like.is_complex()):
        return torch.ones(shape, dtype=like.dtype, device=device)
    wide = torch.complex64 if like.is_complex() else torch.float32
    return torch.randn(shape, generator=draw, dtype=wide, device=draw.device).to(device, like.dtype)


def step_with(
    one: Any, params: Sequence[Tensor], grads: Sequence[Tensor], *, by_closure: bool
) -> None:
    """A step of `one` with the given gradients."""

    def closure() -> Tensor:
        for p, grad in zip(params, grads, strict=True):
            if p.requires_grad:
                p.grad = grad.clone()
        return torch.zeros(())

    closure()
    if by_closure:
        one.step(closure)
    else:
        one.step()


def of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of a state that belong to no parameter."""
    return {k: v for k, v in state.items() if not isinstance(k, Tensor)}


def _but(values: dict[str, Any], *left_out: str) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k not in left_out}
