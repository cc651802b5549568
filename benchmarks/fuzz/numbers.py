"""Where a script keeps a number, how its step uses it, and when it changes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# Lines by the place in the program where they go (`benchmarks.fuzz.source`).
Lines = Mapping[str, list[str]]


@dataclass(frozen=True)
class Piece:
    """A part of a program that can be left out: lines by place, and expressions to be compared at the end."""

    name: str
    lines: Lines
    watch: tuple[str, ...] = ()


@dataclass(frozen=True)
class Holder:
    """A place for a number: `read` is its expression, in the step and in between."""

    read: str
    lines: dict[str, list[str]] = field(default_factory=dict)


def _plain(k: str, v: str) -> Holder:
    return Holder(k, {"setup": [f"{k} = {v}"], "names": [f"nonlocal {k}"]})


def _global(k: str, v: str) -> Holder:
    name = k.upper()
    return Holder(name, {"top": [f"{name} = {v}"], "names": [f"global {name}"]})


def _dataclass(k: str, v: str) -> Holder:
    lines = ["@dataclass", f"class Config_{k}:", f"    value: float = {v}", ""]
    return Holder(f"{k}.value", {"top": lines, "setup": [f"{k} = Config_{k}()"]})


def _class(k: str, v: str) -> Holder:
    return Holder(f"Holder_{k}.value", {"top": [f"class Holder_{k}:", f"    value = {v}", ""]})


def _criterion(k: str, v: str) -> Holder:
    lines = [
        f"class Criterion_{k}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.value = {v}",
        "",
    ]
    return Holder(f"{k}.value", {"top": lines, "setup": [f"{k} = Criterion_{k}()"]})


def _property(k: str, v: str) -> Holder:
    lines = [
        f"class Hidden_{k}:",
        f"    _value = {v}",
        "    @property",
        "    def value(self):",
        "        return self._value",
        "    @value.setter",
        "    def value(self, new):",
        "        self._value = new",
        "",
    ]
    return Holder(f"{k}.value", {"top": lines, "setup": [f"{k} = Hidden_{k}()"]})


def _slots(k: str, v: str) -> Holder:
    lines = [f"class Slotted_{k}:", "    __slots__ = ('value',)", ""]
    return Holder(
        f"{k}.value", {"top": lines, "setup": [f"{k} = Slotted_{k}()", f"{k}.value = {v}"]}
    )


HOLDERS: dict[str, Callable[[str, str], Holder]] = {
    "nonlocal": _plain,
    "global": _global,
    "dict": lambda k, v: Holder(f'{k}["v"]', {"setup": [f'{k} = {{"v": {v}, "other": "text"}}']}),
    "nested": lambda k, v: Holder(f'{k}["a"][1]', {"setup": [f'{k} = {{"a": [0, {v}]}}']}),
    "list": lambda k, v: Holder(f"{k}[0]", {"setup": [f"{k} = [{v}]"]}),
    "namespace": lambda k, v: Holder(
        f"{k}.value", {"setup": [f"{k} = types.SimpleNamespace(value={v})"]}
    ),
    "dataclass": _dataclass,
    "class": _class,
    "criterion": _criterion,
    "property": _property,
    "slots": _slots,
    "model": lambda k, v: Holder(f"model.{k}", {"model": [f"model.{k} = {v}"]}),
    "submodule": lambda k, v: Holder(f"model.b.{k}", {"model": [f"model.b.{k} = {v}"]}),
    "in a module's dict": lambda k, v: Holder(
        f'model.{k}["v"]', {"model": [f'model.{k} = {{"v": {v}}}']}
    ),
    "group": lambda k, v: Holder(
        f'first.param_groups[0]["{k}"]', {"optimizer": [f'first.param_groups[0]["{k}"] = {v}']}
    ),
    "optimizer": lambda k, v: Holder(f"first.{k}", {"optimizer": [f"first.{k} = {v}"]}),
    "function": lambda k, v: Holder(
        f"{k}.value", {"top": [f"def {k}(x):", "    return x", ""], "setup": [f"{k}.value = {v}"]}
    ),
    "trainer": lambda k, v: Holder(f"trainer.{k}", {"setup": [f"trainer.{k} = {v}"]}),
}

# Of a number that counts (0, 1, 2, ...) or is a small float; `R` stands for it.
COUNTER_USES: dict[str, Lines] = {
    "modulo": {"loss": ["if R % 3 == 0:", "    loss = loss + 0.5 * out.square().mean()"]},
    "even": {
        "loss": ["if R % 2 == 0:", "    loss = loss * 1.5", "else:", "    loss = loss + out.mean()"]
    },
    "warmup": {"loss": ["loss = loss * min(1.0, (R + 1) / 3)"]},
    "range": {"loss": ["for _ in range(R % 3):", "    loss = loss * 1.1"]},
    "power": {"loss": ["loss = loss / (1 - 0.9 ** (R + 1))"]},
    "threshold": {"loss": ["if R >= 2:", "    loss = loss + 0.1 * model.a.weight.square().sum()"]},
    "lr": {"grads": ["for g in first.param_groups:", '    g["lr"] = 0.05 / (1 + R)']},
    "frozen at first": {"grads": ["if R < 2:", "    model.c.bias.grad = None"]},
    "index": {"loss": ["loss = loss * (0.5, 1.0, 2.0)[R % 3]"]},
    "float of": {"loss": ["loss = loss + float(R) * out.abs().mean()"]},
    "tensor of": {"loss": ["loss = loss * torch.tensor(1.0 + R, dtype=loss.dtype)"]},
    "returned": {"tail": ['extra["counted"] = R']},
}
FLOAT_USES: dict[str, Lines] = {
    "scale": {"loss": ["loss = loss * R"]},
    "penalty": {"loss": ["loss = loss + R * model.a.weight.square().mean()"]},
    "annealed": {"loss": ["loss = (1 - R) * loss + R * out.square().mean()"]},
    "power": {"loss": ["loss = loss * R ** 2"]},
    "inverse": {"loss": ["loss = loss / (1 + R)"]},
    "sqrt": {"loss": ["loss = loss * math.sqrt(abs(R))"]},
    "cos": {"loss": ["loss = loss * (1 + 0.5 * math.cos(R))"]},
    "min": {"loss": ["loss = loss * min(1.0, R)"]},
    "branch": {"loss": ["if R > 0.6:", "    loss = loss * 2"]},
    "clip": {"grads": ["nn.utils.clip_grad_norm_(model.parameters(), 0.1 + abs(R))"]},
    "gradients": {
        "grads": [
            "for p in model.parameters():",
            "    if p.grad is not None:",
            "        p.grad.mul_(R)",
        ]
    },
    "dropout": {"loss": ["loss = loss + F.dropout(out, p=min(0.5, abs(R) / 2)).square().mean()"]},
    "logits": {"loss": ["loss = loss + F.cross_entropy(out / (0.5 + abs(R)), y)"]},
    "smoothing": {
        "loss": ["loss = loss + F.cross_entropy(out, y, label_smoothing=min(0.9, abs(R)))"]
    },
    "clamp": {"loss": ["loss = loss + out.clamp(-abs(R), abs(R)).square().mean()"]},
    "full": {"loss": ["loss = loss + (out - torch.full_like(out, R)).square().mean()"]},
    "lr": {"grads": ["for g in first.param_groups:", '    g["lr"] = 0.05 * (1 + R)']},
    "huber": {
        "loss": ["loss = loss + F.huber_loss(out, torch.zeros_like(out), delta=0.1 + abs(R))"]
    },
    "numpy": {"loss": ["loss = loss * float(np.exp(-abs(R)))"]},
    "returned": {"tail": ['extra["told"] = R * 2']},
}
IN_STEP = ("R += 1", "R = R + 1")
FLOAT_IN_STEP = ("R *= 0.9", "R = R + 0.125", "R = 0.9 * R + 0.1")
IN_BETWEEN = (
    "R *= 1.5",
    "R = R + 0.25",
    "R = 0.1 * (call + 2)",
    "R /= 2",
    "R = 1.0 if call % 2 else 0.5",
)


def _with(lines: Lines, read: str) -> dict[str, list[str]]:
    return {
        at: [re.sub(r"\bR\b", lambda _: read, line) for line in found]
        for at, found in lines.items()
    }


def _joined(*parts: Lines) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in parts:
        for at, lines in part.items():
            found.setdefault(at, []).extend(lines)
    return found


def counter(draw: random.Random, k: str) -> Piece:
    """A number that the step counts up, before or after it is used."""
    where, use = draw.choice(list(HOLDERS)), draw.choice(list(COUNTER_USES))
    holder = HOLDERS[where](k, "0")
    change = {draw.choice(("head", "tail")): [draw.choice(IN_STEP)]}
    parts = [holder.lines, _with(COUNTER_USES[use], holder.read), _with(change, holder.read)]
    if draw.random() < 0.15:
        parts.append(_with({"between": ["if call == 1:", "    R = 0"]}, holder.read))
    return Piece(f"counter in {where}, {use}", _joined(*parts), _watched(where, holder))


def coefficient(draw: random.Random, k: str) -> Piece:
    """A float that changes between the calls, within the step, or both."""
    where, use = draw.choice(list(HOLDERS)), draw.choice(list(FLOAT_USES))
    holder = HOLDERS[where](k, draw.choice(("0.5", "1.0", "0.25", "1", "np.float64(0.5)")))
    parts = [holder.lines, _with(FLOAT_USES[use], holder.read)]
    when = draw.choice(("between", "between", "between", "step", "both"))
    if when != "step":
        parts.append(_with({"between": [draw.choice(IN_BETWEEN)]}, holder.read))
    if when != "between":
        parts.append(
            _with({draw.choice(("head", "tail")): [draw.choice(FLOAT_IN_STEP)]}, holder.read)
        )
    return Piece(
        f"float in {where}, {use}, changed {when}", _joined(*parts), _watched(where, holder)
    )


def _watched(where: str, holder: Holder) -> tuple[str, ...]:
    return (holder.read,) if where not in ("group",) else ()
