"""PyTorch's optimizers and what goes with them, each on a small network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, SINGLE, Register, Script, whole
from benchmarks.programs.scripts.blocks import CLASSES, mlp, vectors

program = Register("optimizers")


def _batches() -> list[tuple[Tensor, Tensor]]:
    dtype = torch.get_default_dtype()
    return [(x.to(dtype), y) for x, y in (vectors(i) for i in range(CALLS))]


def _step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def _with(
    make: Callable[[Any], Any], between: Callable[[Any], Callable[[int], Any]] | None = None
) -> Script:
    model = mlp(8, 16, CLASSES, act=nn.Tanh)
    optimizer = make(model.parameters())
    after = between(optimizer) if between else lambda call: None
    return Script(_step, model, optimizer, _batches(), after)


@program("RAdam", "rectified after a few steps, by a branch on its count")
def radam() -> Script:
    return _with(lambda p: torch.optim.RAdam(p, lr=1e-2, betas=(0.9, 0.5)))


@program("NAdam", "a product of momenta as a slot")
def nadam() -> Script:
    return _with(lambda p: torch.optim.NAdam(p, lr=1e-2, momentum_decay=0.1))


@program("ASGD", "an average that begins after t0 steps")
def asgd() -> Script:
    return _with(lambda p: torch.optim.ASGD(p, lr=1e-1, t0=2))


@program("Adagrad", "lr_decay; ReduceLROnPlateau by the loss")
def adagrad() -> Script:
    return _with(lambda p: torch.optim.Adagrad(p, lr=1e-1, lr_decay=0.1))


@program("Adamax", "an infinity norm; MultiStepLR")
def adamax() -> Script:
    def between(optimizer: Any) -> Callable[[int], Any]:
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
        return lambda call: scheduler.step()

    return _with(lambda p: torch.optim.Adamax(p, lr=1e-2), between)


@program("Rprop", "signs of gradients, step sizes as slots")
def rprop() -> Script:
    return _with(lambda p: torch.optim.Rprop(p, lr=1e-2))


@program("Adafactor", "PyTorch's own, factored")
def adafactor() -> Script:
    return _with(lambda p: torch.optim.Adafactor(p, lr=1e-2))


@program("Adafactor (Hugging Face)", "lr by itself from the count, in Python", within=SINGLE)
def adafactor_hf() -> Script:
    import transformers

    return _with(lambda p: transformers.Adafactor(p, lr=None, relative_step=True, warmup_init=True))


@program("AdamW amsgrad, OneCycleLR", "lr and momentum both scheduled")
def one_cycle() -> Script:
    def between(optimizer: Any) -> Callable[[int], Any]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, total_steps=CALLS + 1
        )
        return lambda call: scheduler.step()

    return _with(lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True), between)


@program("SGD nesterov, CyclicLR", "momentum cycles against lr")
def cyclic() -> Script:
    def between(optimizer: Any) -> Callable[[int], Any]:
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2)
        return lambda call: scheduler.step()

    return _with(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), between)


@program("SGD, momentum set in between", "a group's numbers are written by hand")
def by_hand() -> Script:
    def between(optimizer: Any) -> Callable[[int], Any]:
        def after(call: int) -> None:
            for group in optimizer.param_groups:
                group["momentum"] = 0.5 + 0.1 * call
                group["weight_decay"] *= 1.5

        return after

    return _with(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=1e-3), between)


@program("LBFGS", "a closure, called several times within the step")
def lbfgs() -> Script:
    model = mlp(8, 8, 1)
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = criterion(model(x).squeeze(-1), y.to(x.dtype))
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Script(train_step, model, optimizer, _batches())


@program("time_sequence_prediction", "two LSTM cells over time, LBFGS with a closure")
def time_sequence() -> Script:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm1, self.lstm2 = nn.LSTMCell(1, 4), nn.LSTMCell(4, 4)
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            outputs = []
            h_t = c_t = h_t2 = c_t2 = torch.zeros(x.size(0), 4, dtype=torch.double)
            for part in x.split(1, dim=1):
                h_t, c_t = self.lstm1(part, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                outputs.append(self.linear(h_t2))
            return torch.cat(outputs, dim=1)

    model, criterion = Sequence().double(), nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    wave = torch.sin(torch.arange(7.0) / 3 + torch.randn(4, 1)).double()
    return Script(train_step, model, optimizer, [(wave[:, :-1], wave[:, 1:])] * CALLS)


@program(
    "swa_utils.AveragedModel", "averages weights outside of the step; SWALR; update_bn at the end"
)
def swa() -> Script:
    made = _with(lambda p: torch.optim.SGD(p, lr=0.1))
    average = torch.optim.swa_utils.AveragedModel(made.model)
    schedule = torch.optim.swa_utils.SWALR(made.optimizer, swa_lr=0.05, anneal_epochs=2)

    def between(call: int) -> None:
        with whole(made.model):
            average.update_parameters(made.model)
        schedule.step()

    made.between, made.watch = between, lambda: average.state_dict()
    return made


@program("EMA by swa_utils", "an average with get_ema_multi_avg_fn, evaluated in between")
def ema_swa() -> Script:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    made = _with(lambda p: torch.optim.Adam(p, lr=1e-2))
    average = AveragedModel(made.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    @torch.no_grad()
    def between(call: int) -> Any:
        with whole(made.model):
            average.update_parameters(made.model)
        return average(made.batches[0][0])

    made.between = between
    return made


@program("two optimizers by kind", "SparseAdam's habit: embeddings apart from the rest, in a dict")
def by_kind() -> Script:
    model = nn.ModuleDict({"emb": nn.Embedding(16, 8), "head": mlp(8, 8, CLASSES)})
    optimizers = {
        "emb": torch.optim.Adagrad(model["emb"].parameters(), lr=0.1),
        "head": torch.optim.AdamW(model["head"].parameters(), lr=1e-2),
    }

    def train_step(model: Any, optimizers: Any, x: Tensor, y: Tensor) -> Tensor:
        for one in optimizers.values():
            one.zero_grad()
        loss = F.cross_entropy(model["head"](model["emb"](x).mean(1)), y)
        loss.backward()
        for one in optimizers.values():
            one.step()
        return loss

    batches = [
        (torch.randint(0, 16, (8, 3)), torch.randint(0, CLASSES, (8,))) for _ in range(CALLS)
    ]
    return Script(train_step, model, optimizers, batches)
