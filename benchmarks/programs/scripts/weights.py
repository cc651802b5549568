"""Averages of weights, frozen weights, weights in other forms."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts.blocks import CLASSES, GPT, mlp, tokens, vectors

program = Register("weights")


def _batches() -> list[tuple[Tensor, Tensor]]:
    dtype = torch.get_default_dtype()
    return [(x.to(dtype), y) for x, y in (vectors(i) for i in range(CALLS))]


def _adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@program("own EMA class", "register, update, apply_shadow and restore around an evaluation")
def own_ema() -> Script:
    class EMA:
        def __init__(self, model: Any, decay: float) -> None:
            self.model, self.decay, self.shadow, self.backup = model, decay, {}, {}
            for name, p in model.named_parameters():
                self.shadow[name] = p.data.clone()

        def update(self) -> None:
            for name, p in self.model.named_parameters():
                self.shadow[name] = (1.0 - self.decay) * p.data + self.decay * self.shadow[name]

        def apply_shadow(self) -> None:
            for name, p in self.model.named_parameters():
                self.backup[name] = p.data
                p.data = self.shadow[name]

        def restore(self) -> None:
            for name, p in self.model.named_parameters():
                p.data = self.backup[name]
            self.backup = {}

    model = mlp(8, 16, CLASSES)
    optimizer, ema, batches = _adam(model), EMA(model, 0.9), _batches()

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> Any:
        with whole(model):
            ema.update()
            ema.apply_shadow()
            with torch.no_grad():
                loss = F.cross_entropy(model(batches[0][0]), batches[0][1])
            ema.restore()
        return loss

    return Script(train_step, model, optimizer, batches, between, lambda: ema.shadow)


@program(
    "EMA with warm-up, within the step",
    "decay = min(0.99, (1 + n) / (10 + n)), n counted in Python",
)
def ema_warm() -> Script:
    class ModelEMA:
        def __init__(self, model: Any) -> None:
            self.module, self.updates = copy.deepcopy(model).eval().requires_grad_(False), 0

        def update(self, model: Any) -> None:
            self.updates += 1
            d = 0.99 * (1 - math.exp(-self.updates / 2))
            with torch.no_grad():
                msd = model.state_dict()
                for k, v in self.module.state_dict().items():
                    if v.dtype.is_floating_point:
                        v *= d
                        v += (1 - d) * msd[k].detach()

    net = mlp(8, 16, CLASSES)
    ema = ModelEMA(net)
    model = nn.ModuleDict({"net": net, "ema": ema.module})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model["net"](x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model["net"])
        return loss

    return Script(train_step, model, optimizer, _batches(), watch=lambda: ema.updates)


@program(
    "LoRA", "frozen weights, two small matrices, a scaling number in the module; merged in between"
)
def lora() -> Script:
    class LoRALinear(nn.Module):
        def __init__(self, base: nn.Linear, r: int = 2, alpha: float = 4.0) -> None:
            super().__init__()
            self.base, self.scaling = base.requires_grad_(False), alpha / r
            self.lora_A = nn.Parameter(0.1 * torch.randn(r, base.in_features))
            self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.dropout(x) @ self.lora_A.T @ self.lora_B.T * self.scaling

    model = GPT(layers=1)
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.c_attn = LoRALinear(block.attn.c_attn)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def between(call: int) -> Any:
        layer = model.blocks[0].attn.c_attn
        with torch.no_grad(), whole(model):
            return layer.base.weight + layer.lora_B @ layer.lora_A * layer.scaling

    return Script(train_step, model, optimizer, [tokens(i) for i in range(CALLS)], between)


@program("gradual unfreezing", "requires_grad of layers switched on between the calls (ULMFiT)")
def unfreezing() -> Script:
    model = mlp(8, 16, 16, CLASSES)
    optimizer = _adam(model)
    for layer in list(model)[:-1]:
        layer.requires_grad_(False)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> None:
        if call < 2:
            model[2 - 2 * call].requires_grad_(True)

    return Script(train_step, model, optimizer, _batches(), between)


@program("torch.compile(model)", "nanoGPT's default")
def compiled() -> Script:
    model = GPT(layers=1)
    optimizer = _adam(model)
    compiled_model = torch.compile(model, backend="eager")

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Script(train_step, compiled_model, optimizer, [tokens(i) for i in range(CALLS)])


@program("a dict of models", 'models = {"G": ..., "D": ...} given as the model')
def dict_of_models() -> Script:
    models = {"body": mlp(8, 16), "head": nn.Linear(16, CLASSES)}
    optimizer = torch.optim.Adam([p for m in models.values() for p in m.parameters()], lr=1e-2)

    def train_step(models: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(models["head"](torch.relu(models["body"](x))), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, models, optimizer, _batches())
