"""A random program: its parts, drawn from a seed, and the Python source that they make."""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass, replace

from benchmarks.fuzz.numbers import Piece
from benchmarks.fuzz.optimizers import OWN, PLAIN
from benchmarks.fuzz.pieces import habit

FORMS = ("function", "method", "lambda", "partial", "callable", "nested")
BATCHES = ("tuple", "dict", "list", "number", "sizes")
OPTIMIZERS = ("one", "list", "dict")
RETURNED = ("loss", "dict", "tuple", "dataclass")


@dataclass(frozen=True)
class Drawn:
    """What a seed stands for; `pieces` may be dropped one by one."""

    seed: int
    form: str
    batch: str
    many: str
    kinds: tuple[str, str]
    returned: str
    pieces: tuple[Piece, ...]

    @property
    def smaller(self) -> list[Drawn]:
        """The same with one thing less."""
        fewer: list[Drawn] = [
            replace(self, pieces=self.pieces[:i] + self.pieces[i + 1 :])
            for i in range(len(self.pieces))
        ]
        plain = {"form": "function", "batch": "tuple", "many": "one", "returned": "loss"}
        simpler = [replace(self, **{k: v}) for k, v in plain.items() if getattr(self, k) != v]
        if self.kinds[0] != "SGD":
            simpler.append(replace(self, kinds=("SGD", self.kinds[1])))
        return fewer + simpler

    @property
    def name(self) -> str:
        """Its habits in words."""
        base = [self.form, self.batch, self.many, self.kinds[0], self.returned]
        return "; ".join([*(p.name for p in self.pieces), ", ".join(base)])


def draw(seed: int) -> Drawn:
    """The program of a seed."""
    drawn = random.Random(seed)
    kinds = [*PLAIN, *OWN]
    weights = [3] * len(PLAIN) + [2] * len(OWN)
    both = drawn.choices(kinds, weights, k=2)
    return Drawn(
        seed,
        drawn.choice(FORMS),
        drawn.choices(BATCHES, (5, 2, 1, 1, 2))[0],
        drawn.choices(OPTIMIZERS, (6, 1, 1))[0],
        (both[0], both[1]),
        drawn.choices(RETURNED, (5, 2, 2, 1))[0],
        tuple(habit(drawn, f"k{i}") for i in range(drawn.randint(1, 3))),
    )


def source(d: Drawn) -> str:
    """The program as a file that can be run."""

    def lines(place: str, indent: int) -> str:
        found = [line for piece in d.pieces for line in piece.lines.get(place, [])]
        return textwrap.indent("\n".join(found), " " * indent) + "\n" if found else ""

    classes = "\n\n".join(OWN[k] for k in dict.fromkeys(d.kinds) if k in OWN and _used(d, k))
    watch = ", ".join(f"{w!r}: {w}" for p in d.pieces for w in p.watch)
    names = {line for p in d.pieces for line in p.lines.get("names", [])}
    declared = "".join(f"        {line}\n" for line in sorted(names))
    return _PROGRAM.format(
        seed=d.seed,
        name="\n".join(textwrap.wrap(d.name, 100)),
        top=lines("top", 0),
        classes=classes,
        init=lines("init", 8),
        forward=lines("forward", 8),
        setup=lines("setup", 4),
        model=lines("model", 4),
        optimizers=_optimizers(d),
        after=lines("optimizer", 4),
        names=declared,
        arguments=_ARGUMENTS[d.batch][0],
        unpack=textwrap.indent(_ARGUMENTS[d.batch][1], " " * 8),
        head=lines("head", 8),
        loss=lines("loss", 8),
        zero=_each(d, "zero_grad()"),
        grads=lines("grads", 8),
        update=_each(d, "step()"),
        tail=lines("tail", 8),
        returned=_RETURNED[d.returned],
        form=textwrap.indent(_FORMS[d.form], " " * 4),
        batches=_ARGUMENTS[d.batch][2],
        between=lines("between", 8),
        watch=watch,
    )


def _used(d: Drawn, kind: str) -> bool:
    return kind == d.kinds[0] or d.many != "one"


def _make(kind: str, params: str) -> str:
    return PLAIN[kind].format(p=params) if kind in PLAIN else f"{kind}({params})"


def _optimizers(d: Drawn) -> str:
    if d.many == "one":
        return f"    first = optimizer = {_make(d.kinds[0], 'model.parameters()')}\n"
    rest = "[p for p in model.parameters() if not any(p is q for q in model.c.parameters())]"
    made = [
        f"    first = {_make(d.kinds[0], rest)}",
        f"    second = {_make(d.kinds[1], 'model.c.parameters()')}",
    ]
    both = "[first, second]" if d.many == "list" else '{"a": first, "b": second}'
    return "\n".join([*made, f"    optimizer = {both}"]) + "\n"


def _each(d: Drawn, call: str) -> str:
    if d.many == "one":
        return f"        optimizer.{call}\n"
    over = "optimizer" if d.many == "list" else "optimizer.values()"
    return f"        for one in {over}:\n            one.{call}\n"


_XY = "torch.randn(8, 8, generator=data), torch.randint(0, 4, (8,), generator=data)"
# How the step takes its batch, how it takes it apart, and how the batches are made.
_ARGUMENTS = {
    "tuple": ("x, y", "", f"[({_XY}) for _ in range(CALLS)]"),
    "dict": (
        "batch",
        'x, y = batch["x"], batch["y"]\n',
        "[({k: v for k, v in zip('xy', (" + _XY + "))},) for _ in range(CALLS)]",
    ),
    "list": ("pair", "x, y = pair\n", f"[([{_XY}],) for _ in range(CALLS)]"),
    "number": (
        "x, y, now",
        "x = x * now\n",
        f"[({_XY}, 1.0 + 0.5 * i) for i in range(CALLS)]",
    ),
    "sizes": (
        "x, y",
        "",
        "[(torch.randn(n, 8, generator=data), torch.randint(0, 4, (n,), generator=data))"
        " for n in (8, 4, 8, 12)]",
    ),
}
_RETURNED = {
    "loss": "loss if not extra else (loss, extra)",
    "dict": '{"loss": loss, "out": out.detach(), **extra}',
    "tuple": "loss, out.argmax(-1), extra",
    "dataclass": "Result(loss, extra)",
}
_FORMS = {
    "function": "step = train_step",
    "method": "trainer.run = types.MethodType(lambda self, *given: train_step(*given), trainer)\n"
    "step = trainer.run",
    "lambda": "step = lambda model, optimizer, *batch: train_step(model, optimizer, *batch)",
    "partial": "step = functools.partial(train_step)",
    "callable": "class Stepper:\n    def __call__(self, *given):\n        return train_step(*given)\n\n"
    "step = Stepper()",
    "nested": "def step(model, optimizer, *batch):\n"
    "    def inner():\n        return train_step(model, optimizer, *batch)\n    return inner()",
}

_PROGRAM = '''"""Seed {seed} of benchmarks.fuzz_steps.

{name}
"""
import collections, copy, enum, functools, itertools, math, os, random, time, types
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.programs.script import Script, whole

CALLS = 4


@dataclass
class Result:
    loss: object
    extra: object


class Trainer:
    pass


{top}
{classes}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 4)
{init}
    def forward(self, x):
        h = torch.tanh(self.a(x))
{forward}        h = torch.tanh(self.b(h))
        return self.c(h)


def build():
    torch.manual_seed({seed})
    random.seed({seed}), np.random.seed({seed})
    data = torch.Generator().manual_seed({seed})
    trainer, told = Trainer(), {{}}
{setup}    model = Net()
{model}{optimizers}{after}
    def train_step(model, optimizer, {arguments}):
{names}        extra = {{}}
{unpack}{head}        out = model(x)
        loss = F.cross_entropy(out, y)
{zero}{loss}        loss.backward()
{grads}{update}{tail}        return {returned}

{form}
    batches = {batches}
    probe = torch.randn(8, 8, generator=data), torch.randint(0, 4, (8,), generator=data)

    def between(call):
{names}        told["loss"] = float(call)
{between}        return dict(told)

    return Script(step, model, optimizer, batches, between, lambda: {{{watch}}})


if __name__ == "__main__":
    from benchmarks.fuzz.check import show

    show(__file__)
'''
