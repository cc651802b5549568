"""Sample calls of fused optimizer updates; see `rules.samples`."""

from __future__ import annotations

from typing import Any

import torch

from tutti.graph.ops.fused_updates import KERNELS
from tutti.rules.samples.sample import Operand, Sample, f, positive

_BY_NAME = {k.name: k for k in KERNELS}
_ADAM: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
_SGD: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
_ADAGRAD: dict[str, Any] = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8}
_SHAPES = ((4, 6, 12), (12,), (6, 1), ())


def _update(name: str, shapes: tuple[tuple[int, ...], ...], **numbers: Any) -> Sample:
    """A call for parameters of these shapes, each with slots of its own."""
    kernel = _BY_NAME[name]
    made = {
        "params": f, "grads": f, "exp_avgs": f, "exp_avg_sqs": positive, "sums": positive,
        "max_exp_avg_sqs": positive if numbers.get("amsgrad") else None,
        "momentum_buffers": f if numbers.get("momentum") else None,
        "steps": lambda *_: _count(),
    }  # fmt: skip
    lists = [[make(*s) for s in shapes] if (make := made[n]) else [] for n in kernel.lists]
    return Sample(kernel.op, tuple(lists), numbers)


def _count() -> Operand:
    return Operand((), torch.float32, lambda _, g: torch.randint(1, 9, (), generator=g))


UPDATES = [
    *(_update("adamw", (s,), **_ADAM, amsgrad=False, maximize=False) for s in _SHAPES),
    _update("adamw", _SHAPES[:2], **_ADAM, amsgrad=True, maximize=True),
    _update("adam", _SHAPES[:1], **_ADAM, amsgrad=False, maximize=False),
    _update("adam", _SHAPES[:1], **_ADAM, amsgrad=True, maximize=False),
    _update("sgd", _SHAPES[:1], **_SGD, nesterov=True, maximize=False),
    _update("sgd", _SHAPES[:2], **_SGD | {"dampening": 0.5}, nesterov=False, maximize=True),
    _update("sgd", _SHAPES[:1], **_SGD | {"momentum": 0.0}, nesterov=False, maximize=False),
    _update("adagrad", _SHAPES[:1], **_ADAGRAD, maximize=False),
    _update("adagrad", _SHAPES[:2], **_ADAGRAD, maximize=True),
]
