"""A step's Python uses of tensors' values: refused, since a trace has none but `known_values.py`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tutti.capture.patch_table import (
    ADDRESSES,
    ANOMALY,
    DLPACK,
    FAKE_LOG,
    FORMAT,
    MANUAL_SEED,
    NUMPY,
    REDUCE,
    REPR,
    TENSOR_OF_TENSORS,
)
from tutti.capture.python.known_values import UNKNOWN, known
from tutti.capture.python.ways_out import of_stack
from tutti.errors import CaptureError
from tutti.graph.edits.patch import Patch, caller, replaced
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.torch_private.pytrees import tree_leaves
from tutti.user_lines import is_users, users_level

_RAISED: ContextVar[list[CaptureError]] = ContextVar("raised")


def _refuse(does: str, fix: str) -> Callable[..., Any]:
    def refused(*_args: Any, **_options: Any) -> Any:
        told = of_stack(fix)
        raise noted(
            CaptureError(
                f"the step {does}",
                at=told.at,
                why="the step is captured once, before it has values; Python would not see later ones"
                + told.inside,
                fix=told.fix,
            )
        )

    return refused


def noted(error: CaptureError) -> CaptureError:
    """Note an error, which `values_unknown` raises again at its end: the step may catch it."""
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
_REPR: Any = FakeTensor.__repr__
_TEXT = _refuse(
    "writes a tensor's value into a text", "return the tensor from the step and print it there"
)


def _reduced(x: Any, protocol: Any) -> Any:
    """`copy.copy` works as before; a pickle has no value to write."""
    if caller().f_globals.get("__name__") == "copy":
        return _REDUCE(x, protocol)
    return _PICKLE()


def _array(patch: Patch) -> Callable[..., Any]:
    """A known value as an array; a write into it, which the tensor would not have, raises."""
    plain: Callable[..., Any] = getattr(Tensor, patch.name)

    def read(x: Any, *args: Any, **options: Any) -> Any:
        array = known(x, lambda values: plain(values, *args, **options))
        if array is UNKNOWN:
            return _NUMPY()
        array.flags.writeable = False
        return array

    return read


def _format(x: Any, spec: str) -> str:
    """Without a format, the text of a fake tensor, as for the text of an error; it has no number."""
    if (text := known(x, lambda values: format(values, spec))) is not UNKNOWN:
        return text
    if spec:
        return _TEXT()
    _warn_of_text(caller())
    return repr(x)


def _printed(x: Any, **options: Any) -> str:
    """The text of a fake tensor."""
    _warn_of_text(caller())
    return _REPR(x, **options)


def _warn_of_text(frame: FrameType) -> None:
    """Warn of a user's line, or of `logging` called by one, that makes a text of a tensor."""
    if not is_users(frame.f_code.co_filename):
        return
    told = of_stack("")
    if told.at and not told.inside:
        warnings.warn(
            f"the step writes a tensor into a text at {told.at}: this happens while the step is captured, "
            "before it has values, and at no later call; return the tensor from the step and print it there",
            stacklevel=users_level(),
        )


def _tensor(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor`, which would read the values of tensors in a list."""

    def made(data: Any, *args: Any, **options: Any) -> Any:
        several = not isinstance(data, Tensor)
        if several and any(isinstance(x, FakeTensor) for x in tree_leaves(data)):
            _refuse("makes a tensor of a list of tensors", "torch.stack(list_of_tensors)")()
        return plain(data, *args, **options)

    return made


_WHERE = _refuse(
    "asks for the address of a tensor, which a trace does not have",
    "compare the tensors themselves: p is q, p in a_set, id(p)",
)


def _address(patch: Patch) -> Callable[..., Any]:
    """The address, for PyTorch's own code and of a tensor with memory; a fake has one of zero."""
    plain: Callable[..., Any] = getattr(patch.owner, patch.name)

    def asked(x: Any) -> Any:
        has_none = isinstance(x, FakeTensor) or x.device.type == "meta"
        if not has_none:
            return plain(x)
        if is_users(caller().f_code.co_filename):
            return _WHERE()
        with warnings.catch_warnings():  # of PyTorch's own question, as in `copy.deepcopy`
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            return plain(x)

    return asked


_SEED = _refuse(
    "seeds PyTorch's generator",
    "seed before the training begins; for the same numbers at every call, draw them before the step and hand "
    "them over as arguments",
)


_REFUSED = (
    *((patch, _array(patch)) for patch in NUMPY.values()),
    *((patch, _MEMORY) for patch in DLPACK),
    (REDUCE, _reduced),
    (MANUAL_SEED, _SEED),
    (ANOMALY, lambda *_: None),
    (FORMAT, _format),
    (REPR, _printed),
)


@contextlib.contextmanager
def values_unknown() -> Iterator[None]:
    """Inside, a read of values into NumPy, or into a text, raises `CaptureError` with the user's line.

    A line that prints a whole tensor gives a warning. If the step catches the error, the end raises it
    again. PyTorch's own search for NaN is off.
    """
    raised = _RAISED.set([])
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False)
    try:
        made = _tensor(TENSOR_OF_TENSORS.original)
        where = [(patch, _address(patch)) for patch in ADDRESSES]
        with replaced(*_REFUSED, *where, (TENSOR_OF_TENSORS, made), (FAKE_LOG, True)):
            yield
        for error in _RAISED.get():
            raise error
    finally:
        torch.set_anomaly_enabled(*anomaly)
        _RAISED.reset(raised)
