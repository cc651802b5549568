"""The time of one kernel on a device: arithmetic or bytes, with a floor by its launch.

    seconds = max(host, kernel gap + the longer of arithmetic and bytes)
    limit     launches       memory        arithmetic

`host` is what an eager runtime needs on the host for each op: small kernels wait for it. A program that
launches nothing op by op (CUDA graphs, XLA) has no such floor.
"""

from __future__ import annotations

from tutti.costs.batch_norm_seconds import batch_norm_seconds
from tutti.costs.kernels import ATTENTION, BATCH_NORM, CONVOLUTION, DeviceKernel
from tutti.costs.matmul_seconds import matmul_seconds
from tutti.hardware.accelerator import Device

# What a kernel's seconds are for: the host's launch, bytes of memory, or arithmetic.
LAUNCHES, MEMORY, ARITHMETIC = "launches", "memory", "arithmetic"


def kernel_seconds(kernel: DeviceKernel, device: Device, *, eager: bool = True) -> float:
    """Seconds of one kernel.

    Args:
        kernel: of `kernels_of`.
        device: with dense peaks.
        eager: each op is launched by the host when its turn comes.

    Raises:
        PlanError: the device has no peak of the matmul's dtype.
    """
    return limited_seconds(kernel, device, eager=eager)[0]


def limited_seconds(
    kernel: DeviceKernel, device: Device, *, eager: bool = True
) -> tuple[float, str]:
    """Seconds of one kernel and what they are for; see `kernel_seconds`."""
    moving, computing = _moving_seconds(kernel, device), _computing_seconds(kernel, device)
    gaps = kernel.num_launches * device.kernel_seconds.value
    launching = kernel.num_launches * device.host_seconds.value if eager else 0.0
    busy = gaps + max(computing, moving)
    if launching > busy or gaps > max(computing, moving):
        return max(launching, busy), LAUNCHES
    return busy, ARITHMETIC if computing > moving else MEMORY


def _moving_seconds(kernel: DeviceKernel, device: Device) -> float:
    """Seconds to read and write a kernel's bytes; a measured rate of batch norms has them in it."""
    if kernel.kind == BATCH_NORM and device.batch_norm_rate:
        return 0.0
    return kernel.nbytes / (device.bandwidth.value * device.memory_efficiency.value)


def _computing_seconds(kernel: DeviceKernel, device: Device) -> float:
    if kernel.kind == BATCH_NORM and device.batch_norm_rate:
        return batch_norm_seconds(kernel, device, device.batch_norm_rate.value)
    if kernel.matmul is not None:
        return matmul_seconds(kernel.matmul, device)
    if not kernel.flops:
        return 0.0
    own = {
        ATTENTION: device.attention_efficiency,
        CONVOLUTION: device.convolution_efficiency,
    }.get(kernel.kind)
    reached = own or device.matmul_efficiency
    return kernel.flops / (device.peak_of(kernel.dtype) * reached.value)
