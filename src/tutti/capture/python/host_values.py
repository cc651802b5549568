"""What a step does with the values of tensors in Python while it is traced, when there are none."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch.utils.dlpack
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from tutti.errors import CaptureError
from tutti.user_lines import quoted, user_line

_LOG = logging.getLogger("torch._subclasses.fake_tensor")  # tells each error of a trace once more


_RAISED: ContextVar[list[CaptureError]] = ContextVar("raised")


def _refuse(does: str, fix: str) -> Callable[..., Any]:
    def refused(*_args: Any, **_options: Any) -> Any:
        raise noted(
            CaptureError(
                f"the step {does}",
                at=quoted(user_line()),
                why="the step is captured once, before it has values; Python would not see later ones",
                fix=fix,
            )
        )

    return refused


def noted(error: CaptureError) -> CaptureError:
    """An error to be raised, and once more at the end of `values_unknown`: the step may catch it."""
    _RAISED.get().append(error)
    return error


_NUMPY = _refuse(
    "reads a tensor's values into NumPy",
    "torch's own functions on tensors; or return the tensor from the step and convert it there",
)
_MEMORY = _refuse(
    "hands a tensor's memory to another library",
    "torch's own functions on tensors; or return the tensor from the step and hand it over there",
)
_PICKLE = _refuse(
    "writes a tensor's values into a file or a pickle",
    "save after the step: step.save(path), or torch.save of what it returns",
)
_REDUCE: Any = FakeTensor.__reduce_ex__
_TEXT = _refuse(
    "writes a tensor's value into a text", "return the tensor from the step and print it there"
)


def _reduced(x: Any, protocol: Any) -> Any:
    """For `copy.copy` as ever; for pickle there is nothing to write."""
    if sys._getframe(1).f_globals.get("__name__") == "copy":
        return _REDUCE(x, protocol)
    return _PICKLE()


def _format(x: Any, spec: str) -> str:
    """Without a format, as a trace shows it: of a text in an error that is raised, say."""
    return _TEXT() if spec else repr(x)


def _tensor(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor`, which would look at the values of tensors in a list."""

    def made(data: Any, *args: Any, **options: Any) -> Any:
        several = not isinstance(data, Tensor)
        if several and any(isinstance(x, FakeTensor) for x in tree_leaves(data)):
            _refuse("makes a tensor of a list of tensors", "torch.stack(list_of_tensors)")()
        return plain(data, *args, **options)

    return made


_SEED = _refuse(
    "seeds PyTorch's generator",
    "seed before the training begins; for the same numbers at every call, draw them before the step and hand "
    "them over as arguments",
)


@contextlib.contextmanager
def values_unknown() -> Iterator[None]:
    """Inside, to read values into NumPy, or into a text, raises `CaptureError` with the user's line.

    So it does at the end, where the step has caught the error. PyTorch's own search for NaN is off.
    """
    raised = _RAISED.set([])
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False)
    try:
        with _patched():
            yield
        for error in _RAISED.get():
            raise error
    finally:
        torch.set_anomaly_enabled(*anomaly)
        _RAISED.reset(raised)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    with (
        mock.patch.object(FakeTensor, "numpy", _NUMPY),
        mock.patch.object(FakeTensor, "__array__", _NUMPY),
        mock.patch.object(FakeTensor, "__dlpack__", _MEMORY),
        mock.patch.object(FakeTensor, "__reduce_ex__", _reduced),
        mock.patch.object(torch.utils.dlpack, "to_dlpack", _MEMORY),
        mock.patch.object(torch, "manual_seed", _SEED),
        mock.patch.object(torch, "set_anomaly_enabled", lambda *_: None),
        mock.patch.object(FakeTensor, "__format__", _format),
        mock.patch.object(torch, "tensor", _tensor(torch.tensor)),
        mock.patch.object(_LOG, "disabled", True),
    ):
        yield
