"""The table of rules: op -> text, or a function of the call that gives a rule."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from tutti.errors import TuttiError
from tutti.rules.families import (
    attention,
    contraction,
    convolution,
    cuts,
    experts,
    fourier,
    indexing,
    interpolation,
    linear_algebra,
    losses,
    norms,
    reductions,
    updates,
    views,
)
from tutti.rules.families.pointwise import derived_pointwise
from tutti.rules.rule import Rule, spelled

Entry = str | Callable[[fx.Node], Rule | None]

TABLE: dict[Any, Entry] = {}
_FAMILIES = (
    *(views, contraction, reductions, losses, cuts, indexing, experts),
    *(attention, norms, convolution, interpolation, fourier, linear_algebra, updates),
)
for _family in _FAMILIES:
    TABLE.update(_family.RULES)

_OWN: dict[Any, Entry] = {}


def add_rule(op: str, text: str) -> None:
    """Register factor rule `text` for the custom op named `op` ("mylib::op", any overload).

    Raises:
        TuttiError: an `op` that is no name of a registered op, or a `text` that is no rule.
    """
    namespace, _, name = op.partition("::") if isinstance(op, str) else ("", "", "")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace and name else None
    if packet is None or not hasattr(packet, "overloads"):
        raise TuttiError(
            f"tutti.rule: there is no op {op!r}" + " yet" * bool(name),
            fix='the name of a custom op, "namespace::op", after its torch.library.custom_op(...)',
        )
    if not isinstance(text, str) or "->" not in text:
        raise TuttiError(
            f"tutti.rule: {text!r} is no rule of {op}",
            why='a rule names the dims of each operand and each result, and has "->" between them',
            fix='such as "m k, k n -> m n" for a product of matrices',
        )
    for overload in packet.overloads():
        _OWN[getattr(packet, overload)] = text


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call, or None without one: its operands must then be whole."""
    if node.target is operator.getitem:
        return None
    entry = _OWN.get(node.target) or TABLE.get(node.target)
    if entry is None:
        return derived_pointwise(node)
    if callable(entry):
        return entry(node)
    return spelled(entry)(node)


def is_tensor_call(node: fx.Node) -> bool:
    """Whether a node computes tensors, from tensors or nothing (not scalars, not an unpacking)."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    val = node.meta.get("val")
    if isinstance(val, list | tuple):
        return any(isinstance(v, Tensor) for v in val)
    return isinstance(val, Tensor)
