"""Random numbers that do not depend on the layout.

A random value is a pure function of `(seed, stream, step, global index)`. There is no generator
state: the rank that owns an element computes the same number as one device, for any block of any
tensor, in integer arithmetic with the same bits on every device: plain tensor ops, on a GPU one kernel.

Element `n` (row-major in the *global* shape) of the stream with 64-bit key `(k0, k1)` gets, in
32-bit arithmetic that wraps,

    x = n * 0x9E3779B9 + k0          a Weyl sequence: the multiplier is the golden ratio's
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + k1
    x = x ^ (x >> 15)
    x = x * 0x846CA68B               the upper bits are now mixed: enough for a comparison
    x = x ^ (x >> 16)                the lower bits too

which is the `lowbias32` hash (C. Wellons, "Prospecting for hash functions", 2018) with a key added
before and within it. Keys come from the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", 2014): only well-mixed keys make independent streams.
For a fixed key the hash is a bijection, so a permutation has no ties. (SplitMix64 on int64 tensors
would also serve for the elements, but takes 1.5 times as long.)

A tensor of more than 2**32 elements is hashed on two levels: its row number is mixed into the key,
in 64 bits, and the column is hashed with that row's own key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.torch_private.jit_kernels import jit_kernel

_GOLDEN = 0x9E3779B9
_CONSTANTS = (16, 0xFFFF, 0x7FEB352D, 15, 0x1FFFF, 0x846CA68B - 2**32)  # shift, mask, factor, twice
_MASK64, _WEYL64 = 2**64 - 1, 0x9E3779B97F4A7C15
_MUL1_64, _MUL2_64 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Elements hashed at a time: on a CPU, two scratch blocks of int32 that stay in the second-level
# cache; elsewhere it only bounds the scratch memory.
CHUNK_CPU, _CHUNK = 2**17, 2**26
# Up to this many elements a block keeps its hash inputs whole: there an op's overhead exceeds its work.
_SMALL = 2**15

# Bits of a uniform number: as many as the type holds exactly in [1/2, 1), but no more than float32,
# so that a program promoted to float64 sees the same numbers.
_DIGITS = {torch.float64: 24, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _signed(value: int, num_bits: int) -> int:
    """The low `num_bits` of `value` as a two's-complement number."""
    value &= (1 << num_bits) - 1
    return value - (1 << num_bits) if value >> (num_bits - 1) else value


def _mix_int(value: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers."""
    value = ((value ^ (value >> 30)) * _MUL1_64) & _MASK64
    value = ((value ^ (value >> 27)) * _MUL2_64) & _MASK64
    return value ^ (value >> 31)


def key(seed: int, stream: int, step: int) -> int:
    """The 64-bit key of one tensor of random numbers: `mix(mix(mix(seed) + stream) + step)`.

    seed: of the run. stream: the number of the random op in the program. step: of training.
    """
    mixed = _mix_int((seed + _WEYL64) & _MASK64)
    mixed = _mix_int((mixed + stream * _WEYL64) & _MASK64)
    return _mix_int((mixed + step * _WEYL64) & _MASK64)


@dataclass(frozen=True, eq=False)
class RandomBlock:
    """The rank's part of a global tensor, ready to be hashed: make it once, draw from it each step.

    shape: the block's own. cols: hash input of each position of the last dim, int32.
    rows: hash input of all other dims together, int32 [rows, 1]; with two levels the row's number, int64.
    constants: the hash's, as int32 scalars: a tensor op takes them 2 us faster than numbers.
    small: `rows + cols`, in the block's shape, of a small block with one level.
    """

    shape: tuple[int, ...]
    rows: Tensor
    cols: Tensor
    two_level: bool
    constants: tuple[Tensor, ...]
    small: Tensor | None = None

    @classmethod
    def of(
        cls, index: Sequence[Tensor], shape_global: Sequence[int], device: torch.device | str
    ) -> RandomBlock:
        """The block at the global positions `index[d]` (1-D, int64) of each dim `d`."""
        assert len(index) == len(shape_global), "one vector of positions per dim"
        shape = tuple(len(vector) for vector in index)
        two_level = math.prod(shape_global) > 2**32
        one = torch.zeros(1, dtype=torch.int64, device=device)
        flat, sizes = [vector.to(device) for vector in index] or [one], list(shape_global) or [1]
        if len(sizes) == 1 or sizes[-1] > 2**32:  # rows of one element
            flat, sizes = [*flat, one], [*sizes, 1]
        rows = _linear(flat[:-1], sizes[:-1]).unsqueeze(1)
        if not two_level:
            rows = (rows * _signed(sizes[-1] * _GOLDEN, 64)).int()  # the low 32 bits
        constants = torch.tensor(_CONSTANTS, dtype=torch.int32).unbind()
        cols = (flat[-1] * _GOLDEN).int()
        small = not two_level and math.prod(shape) <= _SMALL
        whole = (rows + cols).view(shape) if small else None
        return cls(shape, rows, cols, two_level, constants, whole)


def _linear(index: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Row-major index of every combination of positions, int64, flattened."""
    number = index[0]
    for vector, size in zip(index[1:], sizes[1:], strict=True):
        number = (number.unsqueeze(1) * size + vector).flatten()
    return number


def _mix_rows(rows: Tensor, key: int) -> Tensor:
    """SplitMix64's finalizer of `key + row * weyl`, in int64 (`>>` copies the sign: masked off)."""
    x = rows * _signed(_WEYL64, 64) + _signed(key, 64)
    for shift, factor in ((30, _MUL1_64), (27, _MUL2_64), (31, 1)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor, 64)
    return x


def _keys(key: int, block: RandomBlock) -> tuple[Tensor, Tensor | int]:
    """The keys added before the hash, int32 [rows, 1], and within it: one for all rows or one per row."""
    if not block.two_level:
        return block.rows + _signed(key, 32), _signed(key >> 32, 32)
    mixed = _mix_rows(block.rows, key)
    return mixed.int(), (mixed >> 32).int()


# The hash as one kernel of a GPU. `whole`: with its last line.
_CODE = """template <typename T> T hashed(T row, T col, T inner, T whole) {
  unsigned int x = (unsigned int)row + (unsigned int)col;
  x = (x ^ (x >> 16)) * 0x7FEB352Du + (unsigned int)inner;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return (T)(whole ? x ^ (x >> 16) : x);
}"""
_OF_SUM = jit_kernel(_CODE, col=0, inner=0, whole=0)
_ONE_KEY = jit_kernel(_CODE, inner=0, whole=0)
_KEY_OF_EACH_ROW = jit_kernel(_CODE, whole=0)


def _hashed(
    rows: Tensor,
    cols: Tensor | None,
    inner: Tensor | int,
    constants: tuple[Tensor, ...],
    *,
    whole: bool,
) -> Tensor:
    """The hash of `rows + cols`, or of `rows` alone, which it may overwrite; `whole`: with its last line."""
    if rows.device.type == "meta":  # in the form of a GPU's kernel, for a count of bytes
        return rows + (0 if cols is None else cols)
    if rows.device.type == "cuda":
        if cols is None:
            return _OF_SUM(rows, inner=inner, whole=int(whole))
        if isinstance(inner, int):
            return _ONE_KEY(rows, cols, inner=inner, whole=int(whole))
        return _KEY_OF_EACH_ROW(rows, cols, inner, whole=int(whole))
    shift1, mask1, factor1, shift2, mask2, factor2 = constants
    x = rows if cols is None else rows + cols
    scratch = x >> shift1
    x.bitwise_xor_(scratch.bitwise_and_(mask1)).mul_(factor1).add_(inner)
    torch.bitwise_right_shift(x, shift2, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_(mask2)).mul_(factor2)
    if whole:
        torch.bitwise_right_shift(x, 16, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_(0xFFFF))
    return x


Finish = Callable[[Tensor, Tensor], object]  # hash, part of the result to fill
Index = Sequence[Tensor] | RandomBlock
Device = torch.device | str


def _block(index: Index, shape_global: Sequence[int], device: Device) -> RandomBlock:
    return index if isinstance(index, RandomBlock) else RandomBlock.of(index, shape_global, device)


def _draw(
    key: int,
    index: Index,
    shape_global: Sequence[int],
    device: Device,
    dtype: torch.dtype,
    finish: Finish,
    *,
    whole: bool = True,
) -> Tensor:
    """Hash the block chunk by chunk; `finish` turns each chunk of bits into results.

    whole: all of the bits count, not only the upper ones.
    """
    block = _block(index, shape_global, device)
    out = torch.empty(block.shape, dtype=dtype, device=device)
    rows, inner = _keys(key, block)
    num_rows, num_cols = len(block.rows), len(block.cols)
    flat = out.view(num_rows, num_cols)
    chunk = CHUNK_CPU if out.device.type == "cpu" else _CHUNK
    if out.numel() <= chunk:
        finish(_hashed(rows, block.cols, inner, block.constants, whole=whole), flat)
        return out
    height = max(1, chunk // num_cols)
    for start in range(0, num_rows, height):
        part = slice(start, start + height)
        some = inner if isinstance(inner, int) else inner[part]
        made = _hashed(rows[part], block.cols, some, block.constants, whole=whole)
        finish(made, flat[part])
    return out


def bits(key: int, index: Index, shape_global: Sequence[int], device: Device = "cpu") -> Tensor:
    """32 random bits per element, as int32.

    key: from `key`. index: one 1-D int64 tensor of global positions per dim, all that this rank
    holds of that dim in its order (or their `RandomBlock`). shape_global: of the whole tensor.
    """

    def finish(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    return _draw(key, index, shape_global, device, torch.int32, finish)


def keep_mask(
    key: int, index: Index, shape_global: Sequence[int], p: float, device: Device = "cpu"
) -> Tensor:
    """Bool mask that is true with probability `1 - p` (to 2**-32), for dropout."""
    threshold = round(p * 2**32) - 2**31
    block = _block(index, shape_global, device)
    if block.small is not None and threshold < 2**31:
        keys, inner = block.small + _signed(key, 32), _signed(key >> 32, 32)
        return _hashed(keys, None, inner, block.constants, whole=False) >= threshold

    def finish(x: Tensor, out: Tensor) -> None:
        if threshold >= 2**31:
            out.fill_(False)
        else:
            torch.ge(x, threshold, out=out)

    return _draw(key, block, shape_global, device, torch.bool, finish, whole=False)


def uniform(
    key: int,
    index: Index,
    shape_global: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Tensor:
    """Uniform in [0, 1): the leading 24 bits (11 in float16, 8 in bfloat16), exact in `dtype`.

    float64 holds the same values as float32; the shorter types hold them rounded down.
    """
    digits = _DIGITS[dtype]

    def finish(x: Tensor, out: Tensor) -> None:
        out.copy_(x.bitwise_right_shift_(32 - digits))
        out.mul_(0.5**digits).add_(0.5)

    return _draw(key, index, shape_global, device, dtype, finish)


def normal(
    key: int,
    index: Index,
    shape_global: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Tensor:
    """Standard normal, `sqrt(2) erfinv(u)` for 32-bit `u` in (-1, 1): to 6.3 standard deviations.

    Computed in float64 and rounded to float32, for every `dtype`.
    """

    def finish(x: Tensor, out: Tensor) -> None:
        u = x.to(torch.float64).add_(0.5).mul_(2.0**-31)
        out.copy_(u.erfinv_().mul_(math.sqrt(2)).to(torch.float32))

    return _draw(key, index, shape_global, device, dtype, finish)


def randint(
    key: int,
    index: Index,
    shape_global: Sequence[int],
    low: int,
    high: int,
    device: Device = "cpu",
) -> Tensor:
    """Uniform integers in [low, high), int64: `low + (bits * (high - low) >> 32)`.

    As with every 32-bit source, probabilities are uneven by up to `(high - low) / 2**32`.
    """
    span = high - low
    assert 0 < span < 2**31, "an empty range, or one too wide for 32 bits"

    def finish(x: Tensor, out: Tensor) -> None:
        out.copy_(x).add_(2**31).mul_(span).bitwise_right_shift_(32).add_(low)

    return _draw(key, index, shape_global, device, torch.int64, finish)


def permutation(key: int, num: int, device: Device = "cpu") -> Tensor:
    """A random order of `range(num)`, int64: always the whole dim, since a sort needs all of it."""
    return bits(key, [torch.arange(num, device=device)], [num], device).argsort()
