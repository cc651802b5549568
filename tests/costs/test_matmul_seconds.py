"""Matmuls against times computed by hand, on a device of round numbers; and their monotony."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.costs.kernels import MatmulShape
from tutti.costs.matmul_seconds import matmul_seconds
from tutti.hardware import catalog
from tutti.hardware.accelerator import Device
from tutti.hardware.figures import Figure

HALF = torch.float16


def figure(value: float) -> Figure:
    return Figure(value, "of this test")


def round_device(**changed: object) -> Device:
    """100 processors of 1 TFLOP/s each, 1 TB/s of memory, tiles of 100 x 100."""
    base = {
        **{
            "peak": {"float16": figure(1e14)},
            "matmul_efficiency": figure(1.0),
            "processors": figure(100),
        },
        **{"tiles": ((100, 100),), "cache_bandwidth": None, "misaligned": figure(3.0)},
        "partly_aligned": figure(2.0),
        **{"bandwidth": figure(1e12), "memory_efficiency": figure(1.0)},
    }
    return replace(catalog.device("a100-80gb"), **(base | changed))


def shape(m: int, n: int, k: int, batch: int = 1, aligned: int = 16) -> MatmulShape:
    return MatmulShape(batch, m, n, k, HALF, aligned)


# 2 * 100 * 100 * k FLOP at 1 TFLOP/s of a processor, and 20,000 bytes at its hundredth of 1 TB/s.
TILE = 2e-8 * 10_000 + 2e-6


def test_one_wave() -> None:
    assert matmul_seconds(shape(1000, 1000, 10_000), round_device()) == pytest.approx(TILE)


def test_a_wave_more_for_one_tile_more() -> None:
    """101 tiles on 100 processors; k may not be split here, as two halves would fill the waves."""
    twice = matmul_seconds(shape(10_100, 100, 400), round_device())
    assert twice == pytest.approx(2 * (2e-8 * 400 + 2e-6))


def test_a_tile_that_is_not_full_takes_as_long() -> None:
    device = round_device()
    assert matmul_seconds(shape(901, 901, 10_000), device) == matmul_seconds(
        shape(1000, 1000, 10_000), device
    )


def test_a_long_k_is_split_over_idle_processors() -> None:
    """One tile has the memory to itself: eight parts of k, then eight float32 results of 40,000 bytes."""
    expected = 2e-8 * 10_000 / 8 + 20_000 / 1e12 + 8 * 40_000 / 1e12
    assert matmul_seconds(shape(100, 100, 10_000), round_device()) == pytest.approx(expected)


def test_bytes_bound_a_product_with_a_vector() -> None:
    moved = 2 * (10_000 + 10_000 * 100_000 + 100_000)
    found = matmul_seconds(
        shape(1, 100_000, 10_000),
        round_device(processors=figure(1e5), peak={"float16": figure(1e18)}),
    )
    assert found == pytest.approx(moved / 1e12)


def test_a_slow_cache_bounds_a_tile() -> None:
    """200 elements of 2 bytes for each of k, at a hundredth of 1 TB/s: twice as long as the sums."""
    device = round_device(cache_bandwidth=figure(1e12))
    assert matmul_seconds(shape(1000, 1000, 10_000), device) == pytest.approx(4e-8 * 10_000 + 2e-6)


@pytest.mark.parametrize(("aligned", "times"), [(16, 1), (8, 2), (4, 2), (2, 3)])
def test_rows_that_are_not_aligned_take_longer(aligned: int, times: int) -> None:
    device = round_device()
    best = matmul_seconds(shape(1000, 1000, 10_000), device)
    made = shape(1000, 1000, 10_000, aligned=aligned)
    assert matmul_seconds(made, device) == pytest.approx(times * best)
    without = round_device(misaligned=None, partly_aligned=None)
    assert matmul_seconds(made, without) == best


SIZES = st.integers(1, 20_000)


@given(SIZES, SIZES, SIZES, st.sampled_from(["a100-80gb", "h100", "mi300x", "tpu-v5e", "rtx-4090"]))
def test_no_matmul_is_faster_than_the_peak_or_the_memory(m: int, n: int, k: int, name: str) -> None:
    device = catalog.device(name)
    made = MatmulShape(1, m, n, k, torch.bfloat16)
    seconds = matmul_seconds(made, device)
    assert made.flops / seconds <= device.peak_of(
        torch.bfloat16
    ) * device.matmul_efficiency.value * (1 + 1e-9)
    assert 2 * (m * k + k * n + m * n) / seconds <= device.bandwidth.value


@given(SIZES, SIZES, SIZES, st.integers(1, 5))
def test_a_larger_batch_takes_longer(m: int, n: int, k: int, batch: int) -> None:
    device = catalog.device("a100-80gb")
    assert matmul_seconds(shape(m, n, k, batch), device) <= matmul_seconds(
        shape(m, n, k, batch + 1), device
    )


def test_small_sizes_fall_off_on_an_a100() -> None:
    """The share of 312 TFLOP/s rises with each size, to the 87 % that the best matmul reaches."""
    device = catalog.device("a100-80gb")

    def share(made: MatmulShape) -> float:
        return made.flops / matmul_seconds(made, device) / 312e12

    squares = [share(shape(n, n, n)) for n in (256, 512, 1024, 2048, 4096, 16384)]
    assert squares == sorted(squares)
    assert squares[0] < 0.15 and 0.8 < squares[-1] <= 0.87
    by_k = [share(shape(8192, 8192, k)) for k in (32, 64, 128, 256, 1024, 4096)]
    assert by_k == sorted(by_k) and by_k[0] < 0.15
