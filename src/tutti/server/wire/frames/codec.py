"""Messages as text and tensors: the small fields of a message as JSON, tensors by key beside it.

A field's annotation defines its encoding. `decode` checks the input against the same table, so it refuses
any other type, size or depth. JSON writes a float with enough digits to read the same one again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.server.protocol import ledger as records
from tutti.server.protocol import messages as m
from tutti.server.protocol.messages import TensorPart

TEXT_NBYTES = 2**20
_LARGEST = 2**63 - 1
_MOST_CHARACTERS = 4096

# The position is the kind on the wire and on disk: new ones go to the end.
KINDS: tuple[type, ...] = (
    m.Join,
    m.Pull,
    m.Push,
    m.Load,
    m.Sums,
    m.Settle,
    m.Add,
    m.Beat,
    m.Leave,
    m.Status,
    m.JoinReply,
    m.Done,
    m.Weights,
    m.Partial,
    m.Total,
    m.Figures,
    m.Refused,
    records.Entered,
    records.Departed,
    records.Closed,
    records.Applied,
    records.JoiningEnded,
    m.Share,
    m.Shared,
)
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
REQUESTS = frozenset(NUMBERS[kind] for kind in KINDS if issubclass(kind, m.Request))
REPLIES = frozenset(NUMBERS[kind] for kind in m.Reply.__args__)


class MalformedError(ValueError):
    """Bytes that are no message."""


class Field(NamedTuple):
    """Converts a value to JSON and back (which raises on invalid input)."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _need(condition: bool) -> None:
    if not condition:
        raise MalformedError("a field of another type or size")


def _int(x: Any) -> int:
    _need(type(x) is int and abs(x) <= _LARGEST)
    return x


def _float(x: Any) -> float:
    _need(type(x) is float or (type(x) is int and abs(x) <= 2**53))
    return float(x)


def _str(x: Any) -> str:
    _need(type(x) is str and len(x) <= _MOST_CHARACTERS)
    return x


def _ints(x: Any) -> tuple[int, ...]:
    _need(type(x) is list)
    return tuple(_int(v) for v in x)


def _tensor(x: Any) -> Tensor:
    _need(type(x) is list)
    return torch.tensor([_float(v) for v in x], dtype=torch.float64)


def _by_name(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def whole(x: Any) -> dict[str, Any]:
        _need(type(x) is dict)
        return {_str(name): read(value) for name, value in x.items()}

    return whole


def _counts(x: Any) -> dict[int, int]:
    _need(type(x) is list)
    pairs = [_ints(pair) for pair in x]
    _need(all(len(pair) == 2 for pair in pairs))
    return dict(pairs)  # type: ignore[arg-type]


def _same(x: Any) -> Any:
    return x


def _lists(x: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in x.items()}


_FIELDS: dict[str, Field] = {
    "int": Field(_same, _int),
    "str": Field(_same, _str),
    "tuple[int, ...]": Field(list, _ints),
    "Tensor": Field(lambda x: x.tolist(), _tensor),
    "Mapping[str, float]": Field(lambda x: {n: float(v) for n, v in x.items()}, _by_name(_float)),
    "Mapping[str, Tensor]": Field(_lists, _by_name(_tensor)),
    "Mapping[str, Tensor] | None": Field(
        lambda x: None if x is None else _lists(x),
        lambda x: None if x is None else _by_name(_tensor)(x),
    ),
    "Mapping[int, int]": Field(lambda x: [list(pair) for pair in x.items()], _counts),
}
# Fields that travel as tensors beside the text; a message has one at most.
_PARTS, _TENSORS = "Mapping[int, TensorPart]", "Mapping[int, Tensor]"


@cache
def _plan(kind: type) -> tuple[dict[str, Field], str, bool]:
    """The fields in the text, the one beside it ("" if none), and whether that holds bare tensors."""
    types = {f.name: str(f.type) for f in fields(kind)}
    beside = [n for n, t in types.items() if t in (_PARTS, _TENSORS)]
    assert len(beside) <= 1, kind
    text = {n: _FIELDS[t] for n, t in types.items() if n not in beside}
    name = beside[0] if beside else ""
    return text, name, types.get(name) == _TENSORS


def encode(message: Any) -> tuple[int, bytes, dict[int, TensorPart]]:
    """The kind, text and parts of a message."""
    text, beside, bare = _plan(type(message))
    small = {name: field.write(getattr(message, name)) for name, field in text.items()}
    parts: Mapping[int, Any] = getattr(message, beside) if beside else {}
    if bare:
        parts = {key: TensorPart(x) for key, x in parts.items()}
    return NUMBERS[type(message)], json.dumps(small, separators=(",", ":")).encode(), dict(parts)


def decode(kind: int, text: bytes | bytearray | memoryview, parts: Mapping[int, TensorPart]) -> Any:
    """Decode a message.

    Raises:
        MalformedError: the bytes are no message.
    """
    _need(0 <= kind < len(KINDS) and len(text) <= TEXT_NBYTES)
    plan, beside, bare = _plan(KINDS[kind])
    try:
        small = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise MalformedError("a message that is not JSON") from error
    _need(type(small) is dict and small.keys() == plan.keys())
    values = {name: field.read(small[name]) for name, field in plan.items()}
    if beside:
        _need(not bare or all(p.rows is None and p.scale == 1.0 for p in parts.values()))
        values[beside] = {k: p.values for k, p in parts.items()} if bare else dict(parts)
    else:
        _need(not parts)
    return KINDS[kind](**values)
