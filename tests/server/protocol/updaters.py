"""Small optimizers for servers, and the same steps written plainly for one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutti.server.protocol.keys import VariableBlock, blocks
from tutti.server.protocol.update import WEIGHT, ServedVariable

LR = 0.125
Whole = dict[str, dict[str, Tensor]]
VARIABLES = (
    ServedVariable(name="a", shape=(10, 3), dtype=torch.float64, divisible=True),
    ServedVariable(name="b", shape=(7,), dtype=torch.float64),
    ServedVariable(name="table", shape=(9, 2), dtype=torch.float64, rows=True),
)
BLOCK_NBYTES = 64


@dataclass
class Sgd:
    """w <- w - lr g."""

    variables: tuple[ServedVariable, ...] = VARIABLES
    fingerprint: str = "sgd"
    coupled: bool = False
    given: tuple[str, ...] = ("lr",)
    numbers: tuple[str, ...] = ("lr",)
    rates: tuple[str, ...] = ("lr",)

    def sums(self, variable: str, gradient: Tensor) -> Tensor:
        raise AssertionError("not coupled")

    def scalars(
        self, sums: Mapping[str, Tensor], given: Mapping[str, float]
    ) -> Mapping[str, float]:
        assert not sums
        return given

    def update(
        self,
        variable: str,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        scalars: Mapping[str, float],
    ) -> None:
        state[WEIGHT].sub_(gradient, alpha=scalars["lr"])


def with_slots(variable: ServedVariable) -> ServedVariable:
    slots = dict.fromkeys(("first", "second"), (variable.shape, variable.dtype))
    return ServedVariable(
        name=variable.name,
        shape=variable.shape,
        dtype=variable.dtype,
        slots=slots | {"step": ((), torch.float64)},
        divisible=variable.divisible,
        rows=variable.rows,
    )


@dataclass
class ClippedAdam:
    """Adam after clipping by the norm of all gradients."""

    limit: float = 1.0
    variables: tuple[ServedVariable, ...] = field(
        default_factory=lambda: tuple(with_slots(v) for v in VARIABLES)
    )
    fingerprint: str = "adam"
    coupled: bool = True
    given: tuple[str, ...] = ("lr",)
    numbers: tuple[str, ...] = ("lr", "clip")
    rates: tuple[str, ...] = ("lr",)

    def sums(self, variable: str, gradient: Tensor) -> Tensor:
        return gradient.square().sum().reshape(1)

    def scalars(
        self, sums: Mapping[str, Tensor], given: Mapping[str, float]
    ) -> Mapping[str, float]:
        norm = torch.stack([sums[v.name] for v in self.variables]).sum().sqrt().item()
        return {**given, "clip": min(1.0, self.limit / (norm + 1e-6))}

    def update(
        self,
        variable: str,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        scalars: Mapping[str, float],
    ) -> None:
        g = gradient * scalars["clip"]
        step = state["step"].add_(1)
        first = state["first"].lerp_(g, 0.1)
        second = state["second"].lerp_(g.square(), 0.01)
        unbiased = (second / (1 - 0.99**step)).sqrt() + 1e-8
        state[WEIGHT].sub_(scalars["lr"] / (1 - 0.9**step) * first / unbiased)


UPDATERS = {"sgd": Sgd, "adam": ClippedAdam}


def whole_state(updater: Sgd | ClippedAdam, seed: int = 0) -> Whole:
    chance = torch.Generator().manual_seed(seed)
    return {
        v.name: {WEIGHT: torch.randn(v.shape, dtype=v.dtype, generator=chance)}
        | {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in v.slots.items()}
        for v in updater.variables
    }


def own_numbers(
    updater: Sgd | ClippedAdam, gradients: Mapping[str, Tensor], lr: float
) -> Mapping[str, float]:
    """What follows from the gradients of one device."""
    sums = {n: updater.sums(n, g) for n, g in gradients.items()} if updater.coupled else {}
    return updater.scalars(sums, {"lr": lr})


def plain_step(
    updater: Sgd | ClippedAdam, state: Whole, gradients: dict[str, Tensor], lr: float
) -> None:
    """One device: whole variables, no blocks."""
    scalars = own_numbers(updater, gradients, lr)
    for name, gradient in gradients.items():
        updater.update(name, state[name], gradient, scalars)


def gradient(weights: Mapping[str, Tensor], worker: int, clock: int) -> dict[str, Tensor]:
    """One that tells the weights it was computed with, the worker and the clock."""
    chance = torch.Generator().manual_seed(1000 * clock + worker)
    return {
        n: 0.1 * w + torch.randn(w.shape, dtype=w.dtype, generator=chance)
        for n, w in weights.items()
    }


def cut(updater: Sgd | ClippedAdam, num_servers: int) -> tuple[VariableBlock, ...]:
    return blocks(updater.variables, num_servers, nbytes=BLOCK_NBYTES)


def joined(found: Mapping[int, Tensor], all_blocks: tuple[VariableBlock, ...]) -> dict[str, Tensor]:
    """Whole variables from blocks."""
    whole = {
        b.variable.name: torch.empty(b.variable.shape, dtype=b.variable.dtype) for b in all_blocks
    }
    for key, x in found.items():
        all_blocks[key].of(whole[all_blocks[key].variable.name]).copy_(x)
    return whole


def weights_of(state: Whole) -> dict[str, Tensor]:
    return {n: slots[WEIGHT] for n, slots in state.items()}
