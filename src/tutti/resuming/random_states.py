"""The states of the global random generators, where all ranks have the same."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "random": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
    "torch": (torch.get_rng_state, torch.set_rng_state),
}
_OF_GPU = {"cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state)}


def states() -> dict[str, Any]:
    """The state of each generator, by its module; that of this rank's GPU, once the process uses one."""
    every = _GENERATORS | (_OF_GPU if torch.cuda.is_initialized() else {})
    return {name: get() for name, (get, _) in every.items()}


def digests(found: dict[str, Any]) -> str:
    """A text with a checksum of each state."""
    return json.dumps({n: hashlib.sha256(_bytes(x)).hexdigest() for n, x in found.items()})


def common(texts: Sequence[str]) -> set[str]:
    """The generators whose states are equal in all `digests`."""
    said = [json.loads(text) for text in texts]
    return {name for name in said[0] if len({one.get(name) for one in said}) == 1}


def put(found: dict[str, Any]) -> None:
    """Set the states of generators."""
    every = _GENERATORS | (_OF_GPU if torch.cuda.is_available() else {})
    for name in found.keys() & every.keys():
        every[name][1](found[name])


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, tuple) and any(isinstance(x, np.ndarray | tuple) for x in state):
        return b"".join(map(_bytes, state))
    return repr(state).encode()
