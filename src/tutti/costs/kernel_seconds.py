"""The time of one kernel on a device: arithmetic or bytes, with a floor by its launch.

    seconds = max(host, kernel gap + the longer of arithmetic and bytes)

`host` is what an eager runtime needs on the host for each op: small kernels wait for it. A program that
launches nothing op by op (CUDA graphs, XLA) has no such floor.
"""

from __future__ import annotations

from tutti.costs.batch_norm_seconds import batch_norm_seconds
from tutti.costs.kernels import ATTENTION, BATCH_NORM, CONVOLUTION, DeviceKernel
from tutti.costs.matmul_seconds import matmul_seconds
from tutti.hardware.accelerator import Device


def kernel_seconds(kernel: DeviceKernel, device: Device, *, eager: bool = True) -> float:
    """Seconds of one kernel.

    Args:
        kernel: of `kernels_of`.
        device: with dense peaks.
        eager: each op is launched by the host when its turn comes.

    Raises:
        PlanError: the device has no peak of the matmul's dtype.
    """
    busy = kernel.num_launches * device.kernel_seconds.value + _busy_seconds(kernel, device)
    return max(kernel.num_launches * device.host_seconds.value, busy) if eager else busy


def _busy_seconds(kernel: DeviceKernel, device: Device) -> float:
    moving = kernel.nbytes / (device.bandwidth.value * device.memory_efficiency.value)
    if kernel.kind == BATCH_NORM and device.batch_norm_rate:
        return batch_norm_seconds(kernel, device, device.batch_norm_rate.value)
    if kernel.matmul is not None:
        return max(matmul_seconds(kernel.matmul, device), moving)
    if not kernel.flops:
        return moving
    own = {
        ATTENTION: device.attention_efficiency,
        CONVOLUTION: device.convolution_efficiency,
    }.get(kernel.kind)
    reached = own or device.matmul_efficiency
    return max(kernel.flops / (device.peak_of(kernel.dtype) * reached.value), moving)
