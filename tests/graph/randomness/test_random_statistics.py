"""Random numbers: as good as a hash of this size can be.

Keys are fixed, so every figure below is the same at each run; bounds are about five standard
deviations of a perfect source.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tutti.graph.randomness import random

NUM = 2**19
KEY = random.key(0, 1, 2)


def whole(shape: list[int]) -> list[Tensor]:
    return [torch.arange(size) for size in shape]


def words(key: int, num: int = NUM) -> Tensor:
    """The first unsigned 32-bit words of a key, as int64."""
    return random.bits(key, whole([num]), [num]).to(torch.int64) & (2**32 - 1)


def floats(key: int, num: int = NUM) -> Tensor:
    return random.uniform(key, whole([num]), [num], torch.float64)


def chi_square_deviation(counts: Tensor) -> float:
    """Standard deviations that the chi-square statistic of equally likely cells is off its mean."""
    expected, freedom = float(counts.sum()) / counts.numel(), counts.numel() - 1
    statistic = float((counts - expected).square().sum() / expected)
    return (statistic - freedom) / math.sqrt(2 * freedom)


def correlation(x: Tensor, y: Tensor) -> float:
    """Standard deviations that the correlation of two samples is off zero."""
    pair = torch.stack([x.double().flatten(), y.double().flatten()])
    return float(torch.corrcoef(pair)[0, 1]) * math.sqrt(x.numel())


NEIGHBORS = {
    "seed": (random.key(0, 5, 7), random.key(1, 5, 7)),
    "stream": (random.key(0, 5, 7), random.key(0, 6, 7)),
    "step": (random.key(0, 5, 7), random.key(0, 5, 8)),
    "stream for step": (random.key(0, 5, 6), random.key(0, 6, 5)),
}


@pytest.mark.parametrize("step", range(3))
def test_bytes_are_uniform(step: int) -> None:
    drawn = words(random.key(0, 0, step))
    for shift in (0, 8, 12, 16, 24):
        counts = torch.bincount((drawn >> shift) & 255, minlength=256)
        assert abs(chi_square_deviation(counts)) < 5


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 64, 1000, 4096])
def test_neighbors_are_independent(lag: int) -> None:
    u = floats(KEY)
    assert abs(correlation(u[:-lag], u[lag:])) < 5
    cells = (u[:-lag] * 32).long() * 32 + (u[lag:] * 32).long()
    assert abs(chi_square_deviation(torch.bincount(cells, minlength=1024))) < 5


def test_triples_are_uniform_in_the_cube() -> None:
    x, y, z = (floats(KEY)[: NUM // 3 * 3].view(-1, 3) * 8).long().unbind(1)
    counts = torch.bincount(x * 64 + y * 8 + z, minlength=512)
    assert abs(chi_square_deviation(counts)) < 5


@pytest.mark.parametrize("pair", NEIGHBORS.values(), ids=NEIGHBORS)
def test_neighboring_keys_are_independent(pair: tuple[int, int]) -> None:
    one, two = floats(pair[0]), floats(pair[1])
    for lag in (0, 1, 7):
        assert abs(correlation(one[lag:], two[: NUM - lag])) < 5
    cells = (one * 32).long() * 32 + (two * 32).long()
    assert abs(chi_square_deviation(torch.bincount(cells, minlength=1024))) < 5


def flips(one: Tensor, two: Tensor) -> Tensor:
    """How often each of the 32 bits differs."""
    return (((one ^ two)[:, None] >> torch.arange(32)) & 1).double().mean(0)


def test_flipping_an_index_bit_flips_half_of_the_bits() -> None:
    index = words(random.key(3, 3, 3), 2**15) >> 1  # any positions below 2**31
    drawn = random.bits(KEY, [index], [2**31]).long()
    for bit in range(31):
        rates = flips(drawn, random.bits(KEY, [index ^ (1 << bit)], [2**31]).long())
        assert (rates - 0.5).abs().max() < 0.05
        assert abs(rates.mean() - 0.5) < 0.01


def test_flipping_a_bit_of_seed_stream_or_step_flips_half_of_the_bits() -> None:
    bound = 5.5 / math.sqrt(4 * 2**15)
    for which, bit in itertools.product(range(3), range(0, 32, 5)):
        where = [11, 12, 13]
        where[which] ^= 1 << bit
        rates = flips(words(random.key(11, 12, 13), 2**15), words(random.key(*where), 2**15))
        assert (rates - 0.5).abs().max() < bound


@pytest.mark.parametrize("p", [0.001, 0.1, 0.25, 0.5, 0.9])
def test_masks_keep_their_share_and_are_pairwise_independent(p: float) -> None:
    keep = 1 - p
    masks = [
        random.keep_mask(random.key(0, stream, 0), whole([NUM]), [NUM], p).double()
        for stream in range(6)
    ]
    deviation = math.sqrt(p * keep / NUM)
    assert all(abs(float(mask.mean()) - keep) < 5 * deviation for mask in masks)
    for one, two in itertools.combinations(masks, 2):
        assert abs(correlation(one, two)) < 5
    assert abs(correlation(masks[0][1:], masks[0][:-1])) < 5


def test_masks_of_no_and_of_all_dropout() -> None:
    assert random.keep_mask(KEY, whole([999]), [999], 0.0).all()
    assert not random.keep_mask(KEY, whole([999]), [999], 1.0).any()


def test_uniform_and_normal_have_their_distributions() -> None:
    normal = random.normal(KEY, whole([NUM]), [NUM], torch.float64)
    steps = torch.arange(NUM, dtype=torch.float64) / NUM
    for sample in (floats(KEY), torch.special.ndtr(normal)):
        distance = (sample.sort().values - steps).abs().max()
        assert distance * math.sqrt(NUM) < 2.2  # Kolmogorov-Smirnov, one in 8,000
    assert abs(float(normal.mean())) < 5 / math.sqrt(NUM)
    assert abs(float(normal.var()) - 1) < 5 * math.sqrt(2 / NUM)
    tail = NUM * math.erfc(4 / math.sqrt(2))
    assert abs(int((normal.abs() > 4).sum()) - tail) < 5 * math.sqrt(tail)


def test_randint_is_uniform_in_its_range() -> None:
    drawn = random.randint(KEY, whole([NUM]), [NUM], -3, 97)
    assert drawn.dtype == torch.int64
    assert (int(drawn.min()), int(drawn.max())) == (-3, 96)
    assert abs(chi_square_deviation(torch.bincount(drawn + 3))) < 5


def test_permutations() -> None:
    orders = torch.stack([random.permutation(random.key(0, 0, step), 8) for step in range(4000)])
    assert torch.equal(orders.sort(1).values, torch.arange(8).expand(4000, 8))
    for place in range(8):
        assert abs(chi_square_deviation(torch.bincount(orders[:, place], minlength=8))) < 5
    long = random.permutation(KEY, 2**17)
    assert torch.equal(long.sort().values, torch.arange(2**17))


FAR = {  # blocks of a huge tensor: side by side, 2**32 elements apart, and its end
    "rows": ([2**20, 2**20], [0, 2**9, 2**12, 2**20 - 2**9], 2**9),
    "one dim": ([2**40], [0, 2**18, 2**32, 2**40 - 2**18], 2**18),
}


@pytest.mark.parametrize(("shape", "starts", "size"), FAR.values(), ids=FAR)
def test_two_levels_are_random_too(shape: list[int], starts: list[int], size: int) -> None:
    cols = [torch.arange(2**9)] * (len(shape) - 1)
    blocks = [
        random.uniform(KEY, [torch.arange(start, start + size), *cols], shape).flatten()
        for start in starts
    ]
    for u in blocks:
        counts = torch.bincount((u * 256).long(), minlength=256)
        assert abs(chi_square_deviation(counts)) < 5
        for lag in (1, 2**8, 2**9):
            assert abs(correlation(u[lag:], u[:-lag])) < 5
    for one, two in itertools.combinations(blocks, 2):
        assert abs(correlation(one, two)) < 5
