"""The time of a batch norm on a GPU, with channels first: one block of threads adds up one channel.

    sums      =  bytes of the input / (rate of a block * min(channels, blocks at a time))
    forward   =  sums + (bytes read and written) / memory
    backward  =  2.35 sums, which reads input and gradient twice, and writes

A processor runs two blocks at a time. Source: two ResNets on an H200, `benchmarks.gpu_models`, by kernel.
"""

from __future__ import annotations

from tutti.costs.kernels import DeviceKernel
from tutti.graph.ops.overloads import arguments_of
from tutti.hardware.accelerator import Device

_BLOCKS_OF_A_PROCESSOR = 2
_BACKWARD = 2.35  # as many times as long as the sums of the forward


def batch_norm_seconds(kernel: DeviceKernel, device: Device, rate: float) -> float:
    """Seconds on the device, without its launch.

    Args:
        kernel: a batch norm in training, or its backward.
        device: with its processors and bandwidth.
        rate: bytes of the input per second that a block adds up.
    """
    node = kernel.node
    given = arguments_of(node.target, node.args, node.kwargs)["input"].meta["val"]
    blocks = min(given.shape[1], _BLOCKS_OF_A_PROCESSOR * device.processors.value)
    is_backward = "backward" in str(node.target)
    sums = kernel.read_nbytes / (2 if is_backward else 1) / (rate * blocks)
    if is_backward:
        return _BACKWARD * sums
    return sums + kernel.nbytes / (device.bandwidth.value * device.memory_efficiency.value)
