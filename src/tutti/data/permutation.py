"""A permutation of `range(size)`, computed position by position: no memory, no start-up."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 6
# Halves of few bits mix badly; positions of a small range walk longer instead.
MIN_BITS = 8
_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF_WORD = np.uint64(32)


def key_of(*numbers: int | str) -> int:
    """64 bits that depend on all the numbers, the same in every process."""
    text = "/".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number mixed to 64 bits."""
    x = x * _FACTOR
    x ^= x >> _HALF_WORD
    x *= _MIX
    return x ^ (x >> _HALF_WORD)


def permuted(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The images of `positions` under permutation `key` of `range(size)`.

    A Feistel network permutes the numbers of as many bits as `size` has: each round adds a hash of one half
    of the bits to the other half. An image of `size` or above is permuted again until it lies below (cycle
    walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    if size < 2:
        return positions.copy()
    bits = max(MIN_BITS, (size - 1).bit_length())
    keys = [np.uint64(key_of(key, i)) for i in range(NUM_ROUNDS)]
    found = _network(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(found >= size)
    while outside.size:
        found[outside] = _network(found[outside], bits, keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _network(x: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the numbers of `bits` bits; the rounds change the two halves in turn."""
    num_low = bits // 2
    widths = (np.uint64(num_low), np.uint64(bits - num_low))
    masks = (np.uint64((1 << num_low) - 1), np.uint64((1 << (bits - num_low)) - 1))
    halves = [x & masks[0], x >> widths[0]]
    for i, key in enumerate(keys):
        to = (i + 1) % 2
        halves[to] = halves[to] ^ (mixed(halves[1 - to] ^ key) >> _HALF_WORD & masks[to])
    return halves[1] << widths[0] | halves[0]
