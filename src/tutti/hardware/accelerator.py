"""A device as data: dense peaks, memory, and how much of them kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tutti.errors import PlanError
from tutti.hardware.figures import RATE, SECONDS, SHARE, Bounds, Figure, FigureTable

# Names of dtypes in the files; fp8 stands for both formats.
DTYPES = {
    "float64": (torch.float64, torch.complex128),
    "float32": (torch.float32, torch.complex64),
    "tf32": (),
    "float16": (torch.float16,),
    "bfloat16": (torch.bfloat16,),
    "float8": (torch.float8_e4m3fn, torch.float8_e5m2),
    "int8": (torch.int8,),
}
_PEAK = Bounds(1e8, 2e16, "FLOP/s", "a figure in TFLOP/s needs e12")
_LONGER = Bounds(1, 20, "times as long")
_MATMUL = (
    *("efficiency", "processors", "tiles", "cache_bandwidth"),
    *("misaligned", "partly_aligned", "attention", "convolution"),
)
_MEMORY = ("capacity", "bandwidth", "efficiency", "batch_norm")
_LAUNCH = ("kernel", "host", "call", "probe")


@dataclass(frozen=True)
class Device:
    """One accelerator.

    sparsity: the factor from dense peaks to the sparse ones of the data sheet, if it has any.
    peak: dense FLOP/s by the name of a dtype (`DTYPES`).
    matmul_efficiency: the share of the peak that the best matmul reaches.
    processors: units that compute one tile of a matmul at a time.
    tiles: (m, n) of these tiles.
    cache_bandwidth: bytes per second from the last cache to all processors.
    misaligned: how much longer a matmul takes whose rows are no multiple of 4 bytes.
    partly_aligned: likewise with a multiple of 4 bytes, but not of 16.
    attention_efficiency: the share of the peak that fused attention reaches on the pairs of tokens that it
        computes; that of matmuls where a file has none.
    convolution_efficiency: the share of the peak that convolutions reach, channels first; likewise.
    capacity, bandwidth: of the memory, in bytes and bytes per second.
    memory_efficiency: the share of the bandwidth that kernels reach.
    batch_norm_rate: bytes per second of a batch norm's input that one block of threads, of one channel, adds
        up; without it a batch norm is bound by its bytes alone.
    kernel_seconds: from the end of a kernel to the start of the next in a full queue.
    host_seconds: an eager runtime's time on the host for each op.
    call_seconds: of a call of a step, beside its ops; measured on this machine only.
    probe_seconds: of the speed probe during the calibration of this machine (`planning/speed_probe.py`).
    topology: the name of the usual topology.
    """

    name: str
    sparsity: Figure | None
    peak: Mapping[str, Figure]
    matmul_efficiency: Figure
    processors: Figure
    tiles: tuple[tuple[int, int], ...]
    cache_bandwidth: Figure | None
    misaligned: Figure | None
    partly_aligned: Figure | None
    attention_efficiency: Figure | None
    convolution_efficiency: Figure | None
    capacity: Figure
    bandwidth: Figure
    memory_efficiency: Figure
    batch_norm_rate: Figure | None
    kernel_seconds: Figure
    host_seconds: Figure
    call_seconds: Figure | None
    probe_seconds: Figure | None
    topology: str

    def peak_of(self, dtype: torch.dtype) -> float:
        """Dense FLOP/s of matmuls in a dtype; that of float32 where the file has none of a narrower one.

        Raises:
            PlanError: the file has no peak of this dtype, and float32 cannot stand for it.
        """
        names = [name for name, dtypes in DTYPES.items() if dtype in dtypes]
        for name in names if names == ["float64"] else (*names, "float32"):
            if name in self.peak:
                return self.peak[name].value
        line = f"a line {names[0]} = ..." if names else "a line float32 = ..."
        raise PlanError(f"{self.name} has no peak of {dtype}", fix=f"{line} in [peak] of its file")


def device_of(values: Mapping[str, Any], path: Path) -> Device:
    """The device of a file's tables.

    Raises:
        PlanError: a figure is missing, has no source or cannot be right; an unknown key.
    """
    table = FigureTable(values, str(path))
    table.only(("name", "topology", "sparsity", "peak", "matmul", "memory", "launch"))
    peak, matmul = table.table("peak"), table.table("matmul")
    memory, launch = table.table("memory"), table.table("launch")
    peak.only(DTYPES)
    matmul.only(_MATMUL)
    memory.only(_MEMORY)
    launch.only(_LAUNCH)
    if not peak.values:
        raise PlanError("[peak] has no figure", at=str(path), fix="bfloat16 = { value, source }")
    return Device(
        name=table.text("name"),
        sparsity=table.optional("sparsity", Bounds(1, 8, "times the dense peak")),
        peak={name: peak.figure(name, _PEAK) for name in peak.values},
        matmul_efficiency=matmul.figure("efficiency", SHARE),
        processors=matmul.figure("processors", Bounds(1, 100_000, "processors", whole=True)),
        tiles=matmul.pairs("tiles"),
        cache_bandwidth=matmul.optional("cache_bandwidth", RATE),
        misaligned=matmul.optional("misaligned", _LONGER),
        partly_aligned=matmul.optional("partly_aligned", _LONGER),
        attention_efficiency=matmul.optional("attention", SHARE),
        convolution_efficiency=matmul.optional("convolution", SHARE),
        capacity=memory.figure("capacity", Bounds(1e8, 4e12, "bytes", "GB need e9")),
        bandwidth=memory.figure("bandwidth", Bounds(1e7, 3e13, "bytes per second", "GB/s need e9")),
        memory_efficiency=memory.figure("efficiency", SHARE),
        batch_norm_rate=memory.optional("batch_norm", RATE),
        kernel_seconds=launch.figure("kernel", SECONDS),
        host_seconds=launch.figure("host", SECONDS),
        call_seconds=launch.optional("call", SECONDS),
        probe_seconds=launch.optional("probe", SECONDS),
        topology=table.text("topology"),
    )
