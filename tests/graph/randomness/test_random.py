"""Random numbers: the same however the tensor is split, and the ones that the formula says."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutti.graph.randomness import random

NUM = 2**19
KEY = random.key(0, 1, 2)
MASK32 = 2**32 - 1

Draw = Callable[[list[Tensor], list[int]], Tensor]
DRAWS: dict[str, Draw] = {
    "bits": lambda index, shape: random.bits(KEY, index, shape),
    "keep_mask": lambda index, shape: random.keep_mask(KEY, index, shape, 0.3),
    "uniform": lambda index, shape: random.uniform(KEY, index, shape),
    "normal": lambda index, shape: random.normal(KEY, index, shape),
    "randint": lambda index, shape: random.randint(KEY, index, shape, -5, 1000),
}


def whole(shape: list[int]) -> list[Tensor]:
    return [torch.arange(size) for size in shape]


def words(key: int, num: int = NUM) -> Tensor:
    """The first unsigned 32-bit words of a key, as int64."""
    return random.bits(key, whole([num]), [num]).to(torch.int64) & MASK32


def floats(key: int, num: int = NUM) -> Tensor:
    return random.uniform(key, whole([num]), [num], torch.float64)


# --- the layout does not matter ------------------------------------------------------------------


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("shape", [[], [24], [8, 12], [4, 1, 8, 3]], ids=str)
def test_every_even_split_gives_slices_of_the_whole(draw: Draw, shape: list[int]) -> None:
    full = draw(whole(shape), shape)
    assert full.shape == torch.Size(shape)
    splits = [[num for num in (1, 2, 4, size) if size % num == 0] for size in shape]
    for nums in itertools.product(*splits):
        parts = [torch.arange(size).chunk(num) for size, num in zip(shape, nums, strict=True)]
        for block in itertools.product(*parts):
            mine = full[torch.meshgrid(*block, indexing="ij")] if block else full
            assert torch.equal(draw(list(block), shape), mine)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], list[Tensor]]:
    """A global shape, and any positions of each dim: gaps, repetitions, any order, none at all."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    picks = [draw(st.lists(st.integers(0, size - 1), max_size=9)) for size in shape]
    return shape, [torch.tensor(pick, dtype=torch.int64) for pick in picks]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@settings(max_examples=40)
@given(case=blocks())
def test_any_positions_give_their_part_of_the_whole(
    draw: Draw, case: tuple[list[int], list[Tensor]]
) -> None:
    shape, index = case
    expected = draw(whole(shape), shape)[torch.meshgrid(*index, indexing="ij")]
    assert torch.equal(draw(index, shape), expected)


def test_a_ready_block_draws_the_same() -> None:
    shape, index = [8, 12], [torch.arange(4, 8), torch.arange(0, 12, 2)]
    block = random.RandomBlock.of(index, shape, "cpu")
    for key in (KEY, KEY + 1):
        assert torch.equal(random.bits(key, block, shape), random.bits(key, index, shape))


@pytest.mark.parametrize("shape", [[2**18 + 5], [5, 2**17 - 1], [2**17 + 3, 2]], ids=str)
def test_chunks_of_a_large_block_fit_together(shape: list[int]) -> None:
    full = random.bits(KEY, whole(shape), shape)
    for part in torch.arange(shape[0]).chunk(7):
        assert torch.equal(random.bits(KEY, [part, *whole(shape)[1:]], shape), full[part])


def test_the_shape_does_not_matter_below_two_levels() -> None:
    flat = random.bits(KEY, whole([4 * 6 * 5]), [4 * 6 * 5])
    assert torch.equal(random.bits(KEY, whole([4, 6, 5]), [4, 6, 5]).flatten(), flat)


# --- the hash is the one described ---------------------------------------------------------------


def reference(key: int, number: int) -> int:
    """The module's formula in unbounded integers."""
    x = (number * 0x9E3779B9 + key) & MASK32
    x ^= x >> 16
    x = (x * 0x7FEB352D + (key >> 32)) & MASK32
    x ^= x >> 15
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def splitmix(value: int) -> int:
    """SplitMix64's output function."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value = ((value ^ (value >> shift)) * factor) % 2**64
    return value


def test_bits_match_the_formula() -> None:
    for key in (0, 2**64 - 1, KEY, random.key(7, 8, 9)):
        assert words(key, 50).tolist() == [reference(key, number) for number in range(50)]


@pytest.mark.parametrize("shape", [[2**20, 2**20], [2**40], [4, 2**33]], ids=str)
def test_two_levels_match_the_formula(shape: list[int]) -> None:
    index = [torch.tensor([0, 1, size // 3, size - 1]) for size in shape]
    drawn = random.bits(KEY, index, shape).flatten().to(torch.int64) & MASK32
    cols = shape[-1] if len(shape) > 1 and shape[-1] <= 2**32 else 1
    for value, position in zip(drawn.tolist(), itertools.product(*index), strict=True):
        number = sum(int(p) * math.prod(shape[dim + 1 :]) for dim, p in enumerate(position))
        row_key = splitmix((KEY + number // cols * 0x9E3779B97F4A7C15) % 2**64)
        assert value == reference(row_key, number % cols)


def test_keys_are_distinct_words_of_64_bits() -> None:
    keys = {random.key(*where) for where in itertools.product(range(-3, 30), range(30), range(30))}
    assert len(keys) == 33 * 30 * 30
    assert all(0 <= key < 2**64 for key in keys)
    assert random.key(2**70 + 3, 0, 0) == random.key(3, 0, 0)


# --- types ---------------------------------------------------------------------------------------


def test_float64_holds_the_float32_numbers() -> None:
    for draw in (random.uniform, random.normal):
        short, long = (draw(KEY, whole([NUM]), [NUM], t) for t in (torch.float32, torch.float64))
        assert (short.dtype, long.dtype) == (torch.float32, torch.float64)
        assert torch.equal(short.double(), long)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_short_floats(dtype: torch.dtype, digits: int) -> None:
    exact = random.uniform(KEY, whole([NUM]), [NUM])
    short = random.uniform(KEY, whole([NUM]), [NUM], dtype)
    assert short.dtype == dtype and short.max() < 1
    assert torch.equal(short.float(), (exact * 2**digits).floor() / 2**digits)
    normal = random.normal(KEY, whole([NUM]), [NUM], dtype)
    assert torch.equal(normal, random.normal(KEY, whole([NUM]), [NUM]).to(dtype))


def test_uniform_stays_below_one() -> None:
    u = floats(KEY, 2**22)
    assert u.min() >= 0 and u.max() < 1 and u.max() > 1 - 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("draw", [random.bits, random.uniform], ids=["bits", "uniform"])
@pytest.mark.parametrize("shape", [[300, 1000], [2**20, 2**20]], ids=str)
def test_devices_agree(draw: Callable[..., Tensor], shape: list[int]) -> None:
    index = [torch.arange(300), torch.arange(1000)]
    assert torch.equal(draw(KEY, index, shape, device="cuda").cpu(), draw(KEY, index, shape))


# --- speed ---------------------------------------------------------------------------------------


def test_dropout_takes_no_longer_than_the_built_in_one() -> None:
    """About 0.65 of the time on one thread; ten tries forgive a busy machine."""
    x, p = torch.randn(1024, 512), 0.1
    block = random.RandomBlock.of(whole([1024, 512]), x.shape, "cpu")
    ways: list[Callable[[], Tensor]] = [
        lambda: (x * random.keep_mask(KEY, block, x.shape, p)).mul_(1 / (1 - p)),
        lambda: torch.nn.functional.dropout(x, p, training=True),
    ]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert any(ratio_of_medians(*ways) < 1 for _ in range(10))
    finally:
        torch.set_num_threads(num_threads)


def ratio_of_medians(*ways: Callable[[], Tensor]) -> float:
    """Time of the first over time of the second, in turn, without the first two rounds."""
    seconds: list[list[float]] = [[], []]
    for _, which in itertools.product(range(9), range(2)):
        begin = time.perf_counter()
        ways[which]()
        seconds[which].append(time.perf_counter() - begin)
    return statistics.median(seconds[0][2:]) / statistics.median(seconds[1][2:])
