"""Makes the page `docs/rules.md`: the ops with a rule, and their rules. `python -m tutti.rules.coverage`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tutti.rules.decompositions import DECOMPOSITIONS
from tutti.rules.families.pointwise import LINEAR, UNTAGGED
from tutti.rules.rule import Rule
from tutti.rules.samples.gpu_samples import GPU
from tutti.rules.samples.op_samples import FAMILIES
from tutti.rules.samples.pointwise_samples import pointwise_ops, pointwise_samples
from tutti.rules.samples.sample import Operand, Sample
from tutti.rules.table import rule_of
from tutti.torch_private.fake_tensors import FakeTensorMode

COMMAND = "python -m tutti.rules.coverage > docs/rules.md"
# The set of ops, and the pointwise tags, change with PyTorch.
VERSION = ".".join(torch.__version__.split(".")[:2])
_HEAD = "| op | call | rule | linear in | whole | taken apart | own part |\n" + "| --- " * 7 + "|"
_INTRO = """\
# Rules

    {command}

wrote this page (PyTorch {version}) from the samples that `tests/rules` plays on virtual ranks, against
the op on one device: every factor on every axis, pairs of factors, pending sums in every linear group.

{num_tabled} ops have a rule of their own; {num_pointwise} more are element by element, and theirs is
derived. Every rank gathers the operands of an op without a rule, with a warning that names it.

- *rule*: one word per dim. `k!` stays whole; `(h d)` is a product; `1` has no factor; the op reduces a factor
  that a result lacks, and a split of it makes the result partial.
- *linear in*: groups of operands, from 0; a pending sum may pass through when exactly one group has it.
- *whole*: the factors that must stay whole.
- *taken apart*: the op has a decomposition, for a split of a whole factor.
- *own part*: the factors whose split needs its own code, since the plain op on local tensors would be wrong.
"""


def table() -> str:
    """The page as Markdown."""
    mode = FakeTensorMode()
    families = FAMILIES | {"on a GPU only": GPU}
    tabled = {c.op for calls in families.values() for c in calls}
    pointwise = [op for op in pointwise_ops() if op not in tabled]
    counts = {"num_tabled": len(tabled), "num_pointwise": len(pointwise)}
    lines = [_INTRO.format(command=COMMAND, version=VERSION, **counts)]
    for family, calls in families.items():
        device = "cuda" if calls is GPU else "cpu"
        lines += [f"## {family.capitalize()}\n", _HEAD]
        lines += [_row(c, c.node(mode, device)) for c in _telling(calls, mode, device)]
        lines.append("")
    return "\n".join(lines) + _pointwise(pointwise, mode)


def _telling(calls: Iterable[Sample], mode: FakeTensorMode, device: str) -> list[Sample]:
    """The samples whose op, rule, or parts differ from those shown before."""
    seen: dict[tuple[str, ...], Sample] = {}
    for call in calls:
        rule = rule_of(call.node(mode, device))
        if rule is not None:
            seen.setdefault(
                (str(call.op), str(rule), str(rule.linear), str(list(rule.parts))), call
            )
    return list(seen.values())


def _row(call: Sample, node: fx.Node) -> str:
    rule = rule_of(node)
    assert rule is not None
    cells = [
        f"`{_name(call.op)}`",
        f"`{', '.join(_argument(a) for a in (*call.args, *call.kwargs.values()))}`",
        f"`{rule}`",
        _linear(rule),
        " ".join(sorted(rule.whole & set(rule.factors))),
        "yes" if call.op in DECOMPOSITIONS else "",
        " ".join(f for f in rule.parts),
    ]
    return f"| {' | '.join(cells)} |"


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def _argument(x: Any) -> str:
    if isinstance(x, Operand):
        kind = {torch.int64: "i", torch.bool: "b", torch.complex128: "c"}.get(x.dtype, "f")
        return f"{kind}{list(x.shape)}"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(_argument, x))}]"
    if isinstance(x, float) and math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return str(x)


def _linear(rule: Rule) -> str:
    return ", ".join("+".join(map(str, sorted(g))) for g in rule.linear)


def _pointwise(ops: list[Any], mode: FakeTensorMode) -> str:
    linear: dict[str, str] = {}
    for call in pointwise_samples(mode):
        rule = rule_of(call.node(mode))
        if rule is not None and rule.linear:
            linear.setdefault(_name(call.op), _linear(rule))
    rows = [f"| `{name}` | {groups} |" for name, groups in sorted(linear.items())]
    parts = [
        "## Element by element\n",
        "Derived: dims aligned at the right, a factor each; a dim of size 1 is stretched. All ops that "
        "PyTorch\ntags as pointwise, and those marked with * here. Pending sums pass through:\n",
        "| op | linear in |\n| --- | --- |",
        *rows,
        "\nAll of them:\n",
        textwrap.fill(
            ", ".join(f"`{_name(op)}`{'*' * (op in UNTAGGED)}" for op in ops),
            100,
            break_long_words=False,
            break_on_hyphens=False,
        ),
    ]
    assert set(LINEAR) <= set(pointwise_ops())
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(table(), end="")
