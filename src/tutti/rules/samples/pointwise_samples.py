"""Sample calls of every element-by-element op, made from the ops' own schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tutti.rules.families.pointwise import LINEAR, is_pointwise
from tutti.rules.samples.sample import (
    Operand,
    Sample,
    aten,
    f,
    flags,
    ints,
    pairs,
    positive,
    sample,
)
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.op_tables import all_op_names, schema_of

SAME = ((4, 6, 12),) * 4
STRETCHED = ((4, 6, 12), (6, 1), (1, 1, 12), ())
_WHOLE_NUMBERS = ("bitwise", "shift", "xor", "gcd", "lcm")
_POSITIVE = ("log", "sqrt", "pow", "xlog", "polygamma", "igamma", "zeta", "ndtri", "erfinv", "acos")
_NUMBERS = {"number": 0.7, "float": 0.7, "int": 2, "bool": False, "str": "none"}

# Arguments for ops whose schema does not suffice.
OWN = [
    sample("_to_copy", f(4, 6), dtype=torch.float64),
    sample("_to_copy", f(4, 6), dtype=torch.float32),
    sample("_to_copy", f(4, 0), dtype=torch.bfloat16),
    sample("_to_copy", flags(4, 6), dtype=torch.float64),
    sample("_conj", pairs(4, 6)),
    sample("clamp", f(4, 6), -0.5, 0.5),
    sample("clamp", f(4, 6), None, 0.5),
    sample("clamp.Tensor", f(4, 6), f(6), None),
    sample("clip", f(4, 6), -0.5, 0.5),
    sample("clone", f(4, 6)),
    sample("add.Tensor", f(4, 6), 0.5),
    sample("add.Tensor", f(4, 6), f(4, 1), alpha=2.0),
    sample("sub.Tensor", f(6), f(4, 6), alpha=0.5),
    sample("mul.Tensor", f(4, 6), 0.5),
    sample("mul.Tensor", f(4, 6), flags(6)),
    sample("div.Tensor", f(4, 6), 3.0),
    sample("div.Tensor_mode", f(4, 6), f(4, 6), rounding_mode="floor"),
    sample("div.Scalar_mode", f(4, 6), 0.3, rounding_mode="trunc"),
    sample("masked_fill.Scalar", f(4, 6), flags(4, 6), 0.0),
    sample("masked_fill.Scalar", f(4, 6), flags(4, 1), -1e4),
    sample("masked_fill.Tensor", f(4, 6), flags(6), f()),
    sample("where.self", flags(4, 6), f(4, 6), f(4, 6)),
    sample("where.self", flags(4, 1), f(6), f()),
    sample("isin.Tensor_Scalar", ints(4, 4, 6), 2),
    sample("round.decimals", f(4, 6), decimals=1),
    sample("copy", f(4, 6), f(4, 6)),
    sample("elu_backward", f(4, 6), 1.0, 1.0, 1.0, False, f(4, 6)),
    sample("rrelu_with_noise_backward", f(4, 6), f(4, 6), positive(4, 6), 0.1, 0.4, True, False),
    sample("rrelu_with_noise_backward", f(4, 6), f(4, 6), positive(4, 6), 0.1, 0.4, False, False),
    sample("_prelu_kernel", f(4, 6, 12), f(1, 6, 1)),
    sample("_prelu_kernel_backward", f(4, 6, 12), f(4, 6, 12), f(1, 6, 1)),
    sample("native_dropout_backward", f(4, 6), flags(4, 6), 1.25),
    sample("polar", positive(4, 6), f(4, 6)),
    sample("_standard_gamma_grad", positive(4, 6), positive(4, 6)),
    sample("_dirichlet_grad", positive(4, 6), positive(4, 6), positive(4, 6)),
]


def pointwise_ops() -> list[Any]:
    """Every element-by-element ATen op without mutation, by name."""
    found = []
    for name in _names():
        packet = getattr(aten, name)
        for which in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, which)
            schema = schema_of(op)
            out = any(a.is_out for a in schema.arguments)
            tensors = all("Tensor" in str(r.type) for r in schema.returns)
            if is_pointwise(op) and not schema.is_mutable and not out and tensors:
                found.append(op)
    return found


def _names() -> list[str]:
    """Every ATen op; `dir(torch.ops.aten)` would list only the ops already used."""
    found = all_op_names()
    names = {n.removeprefix("aten::").partition(".")[0] for n in found if n.startswith("aten::")}
    return sorted(n for n in names if hasattr(aten, n))


def pointwise_samples(mode: FakeTensorMode) -> Iterator[Sample]:
    """A call of each op on tensors of one shape, and one on shapes that broadcast if the op allows it."""
    yield from OWN
    own = {s.op for s in OWN}
    for op in pointwise_ops():
        if op not in own or op in LINEAR:
            yield from _of(op, mode, required=op not in own)


def _of(op: Any, mode: FakeTensorMode, *, required: bool) -> Iterator[Sample]:
    plain = _sampled(op, SAME)
    if required or _runs(plain, mode):
        yield plain
    stretched = _sampled(op, STRETCHED)
    num_tensors = len(stretched.operands())
    if num_tensors > 1 and "backward" not in str(op) and _runs(stretched, mode):
        yield stretched


def _runs(call: Sample, mode: FakeTensorMode) -> bool:
    try:
        call.node(mode)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _sampled(op: Any, shapes: tuple[tuple[int, ...], ...]) -> Sample:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    given = iter(shapes)
    for argument in schema_of(op).arguments:
        if argument.has_default_value() and str(argument.type) not in (
            "Tensor",
            "Optional[Tensor]",
        ):
            continue
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if kind == "Tensor":
            value: Any = _tensor(op, argument.name, next(given))
        else:
            whole = any(word in str(op) for word in _WHOLE_NUMBERS)
            value = 2 if whole or argument.name == "n" else _NUMBERS.get(kind)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(op, tuple(args), kwargs)


def _tensor(op: Any, name: str, shape: tuple[int, ...]) -> Operand:
    if name in ("mask", "condition"):
        return flags(*shape)
    if any(word in str(op) for word in _WHOLE_NUMBERS):
        return ints(5, *shape)
    return (positive if any(word in str(op) for word in _POSITIVE) else f)(*shape)
