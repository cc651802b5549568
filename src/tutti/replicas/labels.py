"""The label of a message: the weights in it. Replicas compare labels before they use each other's numbers.

Replicas that run one script send the same weights. But a script may freeze a weight by its own loss, on one
replica alone; then numbers of different weights would meet in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tutti.errors import CommError
from tutti.replicas.traffic import Message

_LABEL = "label of the message"
_FIX = (
    "freeze, unfreeze and change weights at the same steps on all replicas, not by values such as "
)
_FIX += "losses, which are each replica's own"


def labelled(message: Message, weights: Mapping[str, str]) -> Message:
    """`message` with a label.

    Args:
        weights: the names, each with a hash of the value with which it has joined; "" after its first round.
    """
    text = bytearray(json.dumps(weights).encode())
    return message | {_LABEL: torch.frombuffer(text, dtype=torch.uint8)}


def check_labels(step: int, messages: Sequence[Message]) -> None:
    """Raise `CommError` unless all messages of the round after `step` have the same weights."""
    first, *others = [m[_LABEL].cpu() for m in messages]
    for other in others:
        if not torch.equal(first, other):
            raise _apart(step, _read(first), _read(other))


def _read(label: Tensor) -> dict[str, str]:
    return dict(json.loads(bytes(label.tolist())))


def _apart(step: int, one: dict[str, str], other: dict[str, str]) -> CommError:
    for name in (*one, *other):
        if name not in one or name not in other:
            return CommError(
                f"replicas differ in the weights that they have trained before the round after step {step}: "
                f'"{name}"',
                why="a round exchanges the weights trained since the last one, and this one is trained by "
                "some replicas alone",
                fix=_FIX,
            )
        if one[name] != other[name]:
            return CommError(
                f'"{name}" has not begun with the same value on all replicas',
                why=f"it is in a round for the first time, after step {step}; the strategy's state begins "
                "with the value before the weight is trained",
                fix=_FIX,
            )
    return CommError(
        f"replicas have begun to train weights in another order before the round after step {step}",
        why=f"{list(one)[:4]} on one, {list(other)[:4]} on another",
        fix=_FIX,
    )
