"""The states of the global random generators of the CPU, where all ranks have the same."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "random": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
    "torch": (torch.get_rng_state, torch.set_rng_state),
}


def states() -> dict[str, Any]:
    """The state of each generator, by its module."""
    return {name: get() for name, (get, _) in _GENERATORS.items()}


def digests(found: dict[str, Any]) -> str:
    """A text with a checksum of each state."""
    return json.dumps({n: hashlib.sha256(_bytes(x)).hexdigest() for n, x in found.items()})


def common(texts: Sequence[str]) -> set[str]:
    """The generators whose states are equal in all `digests`."""
    said = [json.loads(text) for text in texts]
    return {name for name in said[0] if len({one[name] for one in said}) == 1}


def put(found: dict[str, Any]) -> None:
    """Set the states of generators."""
    for name, state in found.items():
        if name in _GENERATORS:
            _GENERATORS[name][1](state)


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    with np.printoptions(threshold=sys.maxsize):
        return repr(state).encode()
