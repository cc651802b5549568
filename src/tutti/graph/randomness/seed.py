"""The seed of a run, and its range."""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.errors import TuttiError

# As `torch.manual_seed`: those below 0 count from 2**64 down.
LEAST, MOST = -(2**63), 2**64 - 1


def checked_seed(seed: Any) -> int:
    """`seed` as a Python integer.

    Keys of random numbers have 64 bits: a longer seed would repeat the numbers of another.

    Raises:
        TuttiError: for a value that is no integer (a bool, a float, a tensor), or has more than 64 bits.
    """
    if isinstance(seed, bool | np.bool_) or not isinstance(seed, int | np.integer):
        raise TuttiError(
            f"seed={seed!r} is a {type(seed).__name__}, not an integer",
            why="random numbers are a function of the seed, the step and the place, in integers",
            fix="seed=0, or another integer",
        )
    if not LEAST <= seed <= MOST:
        raise TuttiError(
            f"seed={seed} has more than 64 bits",
            why="keys of random numbers have 64: it would give the numbers of another seed",
            fix=f"a seed from {LEAST} to {MOST}, such as {int(seed) % 2**64}",
        )
    return int(seed)
