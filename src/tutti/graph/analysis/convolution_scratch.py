"""Scratch memory of a convolution on a CPU.

oneDNN        half and single precision   operands and results in blocks of channels
unfolded      other dtypes                the columns of a matmul, each input once for each kernel weight

    x [n, c, *size]  ->  columns [n, c * kernel, *size of the result]

A block has as many channels as a vector has numbers of 32 bits, so few channels are padded to more. Plain
tensors of many channels are blocked, too: these copies are the scratch memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

_BLOCKED = (torch.float32, torch.bfloat16, torch.float16)
# The channels in a block, by the instructions of the processor; with others oneDNN has blocks of 8, too.
_CHANNELS = {"AVX512": 16}


def convolution(operands: tuple[Any, ...], result: Any) -> int:
    """Of `aten.convolution`."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = operands
    if _is_unfolded(x):
        if transposed:
            return _columns(result, weight, x, weight.shape[1])
        return _unfolded(x, weight, result, stride, padding, dilation, groups, (x,))
    if transposed or groups > 1:
        return max(x.nbytes + weight.nbytes, result.nbytes)
    wide, made = _blocked(x), _blocked(result)
    if _is_first(x, weight):
        wide = 0
    return max(wide + _blocked_weight(weight) + made - result.nbytes, made)


def convolution_backward(operands: tuple[Any, ...], result: Any) -> int:
    """Of `aten.convolution_backward`: the gradient of the input first, then that of the weight."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups = operands[:10]
    if _is_unfolded(x):
        if transposed:
            return _columns(grad, weight, x, weight.shape[1]) // max(1, x.shape[0])
        return _unfolded(x, weight, grad, stride, padding, dilation, groups, (x, grad))
    if transposed or groups > 1:
        return max(grad.nbytes + x.nbytes, weight.nbytes)
    is_first = _is_first(x, weight)
    back, given = _blocked(grad), _blocked(x)
    weights = _blocked_weight(weight)
    own = x.nbytes if result[0] is not None else 0
    most = own + back + (x.nbytes if is_first else given) + weights
    if is_first and weight.shape[1] % 8:  # a plain input
        most = own + back + 2 * weight.nbytes
    elif is_first and grad.shape[1] <= weight.shape[1]:
        most = own + grad.nbytes + x.nbytes + weight.nbytes
    if own:
        wide = x.nbytes if max(stride) > 1 else given
        to_input = back + weights + wide
        most = max(most, to_input, 3 * own if max(stride) > 1 else wide + own)
    if result[1] is not None:  # its gradient in blocks, then plain: of few positions the largest
        most = max(most, own + weights + weight.nbytes)
    return max(0, most - sum(y.nbytes for y in result if y is not None))


def _is_unfolded(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype not in _BLOCKED


def _unfolded(
    x: Tensor,
    weight: Tensor,
    made: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    read: tuple[Tensor, ...],
) -> int:
    """Columns of all samples; with a dilation of one at a time. Groups take turns, on copies of parts."""
    columns = _columns(x, weight, made, x.shape[1])
    if max(dilation) > 1:
        columns //= max(1, x.shape[0])
    elif math.prod(weight.shape[2:]) == 1 and max(stride) == 1 and not max(padding):
        columns = 0  # a view of the input
    if groups == 1:
        return columns
    return max((columns + sum(y.nbytes for y in read)) // groups, made.nbytes)


def _columns(x: Tensor, weight: Tensor, made: Tensor, channels: int) -> int:
    sizes = x.shape[0], channels, *weight.shape[2:], *made.shape[2:]
    return math.prod(sizes) * x.element_size()


def _blocked(x: Tensor) -> int:
    """Bytes of `x` with its channels padded to whole blocks."""
    return x.nbytes // max(1, x.shape[1]) * _padded(x.shape[1])


def _blocked_weight(weight: Tensor) -> int:
    out, own = weight.shape[:2]
    return weight.nbytes // max(1, out * own) * _padded(out) * _padded(own)


def _padded(channels: int) -> int:
    return -(-channels // _block()) * _block()


def _is_first(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN reads the plain input: one of few channels, as an image."""
    return x.shape[1] < _block() and math.prod(weight.shape[2:]) > 1


@functools.cache
def _block() -> int:
    return _CHANNELS.get(torch.backends.cpu.get_cpu_capability(), 8)
