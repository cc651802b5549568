"""Adds the user's line to errors of PyTorch and of tutti in a capture; errors of the user's code pass."""

from __future__ import annotations

import contextlib
import dis
import re
import sysconfig
import traceback
from collections.abc import Iterator
from types import TracebackType

from torch import fx

from tutti.capture.batch import called
from tutti.capture.python.ways_out import of_error
from tutti.capture.second_trace.random_ops import NO_GENERATOR
from tutti.errors import CaptureError, TuttiError
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.user_lines import is_users, quoted, user_line

_RAISES = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}
# Errors of PyTorch's bindings, which have no frame of their own.
_OF_BINDINGS = (RuntimeError, NotImplementedError)

_ACCUMULATED = (
    "accumulate inside the step, in a loop over parts of the batch or by micro=K in the layout, and leave "
    "this out: gradients are summed over ranks once, before the update"
)
_ENGINE = "loss.backward() and optimizer.step() in place of an engine's model.backward(loss) and model.step()"
# Methods of the wrappers of other libraries, which a module without the wrapper lacks.
_OF_WRAPPERS = {
    "no_sync": _ACCUMULATED,
    "set_requires_gradient_sync": _ACCUMULATED,
    "set_is_last_backward": _ACCUMULATED,
    "backward": _ENGINE,
    "step": _ENGINE,
    "module": "the model itself in place of a wrapper's model.module",
}
# The fix, by a part of the message.
_WAYS_OUT = (
    (
        "SparseTensorImpl",
        "hand sparse tensors over as arguments of the step, where they are taken as dense; inside of it, "
        "tensor.to_dense() before",
    ),
    ("SparseCsrTensorImpl", "hand sparse tensors over as arguments of the step"),
    *((f"object has no attribute '{name}'", fix) for name, fix in _OF_WRAPPERS.items()),
    ("_C.Generator", NO_GENERATOR),  # the tracer of PyTorch 2.11 takes none as an argument
    (
        "Sym",
        "return the tensor from the step, and hand its value over there; in the step it is no plain number",
    ),
)
# Uses of a symbol, known only when the step runs, as a plain number.
_SYMBOL = re.compile(r"\bSym(Float|Int|Bool)\b")
# PyTorch's bindings assert that such a number is none of a symbol's.
_NUMBERS_OF_BINDINGS = ("python_arg_parser.cpp", "SymIntArrayRef expected to contain only concrete")
_OUTSIDE = "compute the number outside of the step and hand it over, or keep it as a plain number"
_CALL = "step(...) with the arguments that the training step takes after the optimizer"
_NO_OPTIMIZER = "with optimizer=None the step is called without one, as train_step(model, *batch)"
_CALL_WITHOUT = (
    "no parameter for an optimizer in the step, and step(...) with the arguments that it takes after the "
    "model; or the optimizer in place of None"
)
_TRACED = "the step is run once by PyTorch's tracer, on tensors without values"
_GENERAL = (
    "call the training step itself, without tutti: where plain PyTorch raises the same, the line is wrong; "
    "where it does not, write the line in another way, or outside of the step"
)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_OURS = "this is a mistake of tutti: report it with the traceback of the cause"


@contextlib.contextmanager
def named() -> Iterator[None]:
    """An exception raised inside becomes a `CaptureError` that names the user's line and the exception.

    Errors of the user's code pass, as do tutti's own.
    """
    try:
        yield
    except TuttiError:
        raise
    except Exception as error:
        if _is_users(error) and not _SYMBOL.search(str(error)):
            raise
        if any(part in str(error) for part in _NUMBERS_OF_BINDINGS):
            told = of_error(error, _OUTSIDE)
            raise CaptureError(
                "the step hands a tensor's value to PyTorch where a plain number decides a size",
                at=told.at or _line(error),
                why="every shape must be known before the step runs" + told.inside,
                fix=told.fix,
            ) from error
        first = str(error).strip().partition("\n")[0] or "no message"
        why, fix = _of_the_call(error) or (
            _TRACED,
            next((fix for part, fix in _WAYS_OUT if part in str(error)), _general(error)),
        )
        what = f"{type(error).__name__} while the step was captured: {first}"
        raise CaptureError(what, at=_line(error), why=why, fix=fix) from error


def refuse_untraced(traced: fx.GraphModule) -> None:
    """Raise `CaptureError` for a value whose creation the trace has not seen."""
    for node in traced.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(traced, str(node.target)), FakeTensor):
            using = [node]
            for one in using:
                using += [x for x in one.users if x not in using]
            sources = (x.meta.get("source") for x in using)
            raise CaptureError(
                "the step uses a tensor made outside its capture",
                at=quoted(next(filter(None, sources), "")),
                why="it comes from another thread, or was kept from an earlier capture",
                fix="compute it in the step's own thread, from the step's arguments",
            )


def _is_users(error: Exception) -> bool:
    """Whether the user's code, or a library's, raised it."""
    last = _innermost(error.__traceback__)
    if last is None or not is_users(last.tb_frame.f_code.co_filename):
        return False
    raised = last.tb_frame.f_code.co_code[last.tb_lasti] in _RAISES
    return raised or not isinstance(error, _OF_BINDINGS)


def _innermost(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb


def _line(error: Exception) -> str:
    return quoted(_within(error) or user_line())


def _within(error: Exception) -> str:
    """The innermost line of the step in the traceback of `error`; "" without one.

    A line of the standard library counts only without another.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    chosen = [f for f in frames if not _is_standard(f.filename)] or frames
    return f"{chosen[-1].filename}:{chosen[-1].lineno}" if chosen else ""


def _is_standard(path: str) -> bool:
    return path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path


def _general(error: Exception) -> str:
    return _GENERAL if _within(error) else _OURS


def _of_the_call(error: Exception) -> tuple[str, str] | None:
    """Reason and way out if the call of the step itself failed: no frame of its own, arguments that do not
    fit."""
    last = _innermost(error.__traceback__)
    if not isinstance(error, TypeError) or last is None:
        return None
    if last.tb_frame.f_code is not called.__code__:
        return None
    has_optimizer = len(last.tb_frame.f_locals["args"]) > 1
    return (_TRACED, _CALL) if has_optimizer else (_NO_OPTIMIZER, _CALL_WITHOUT)
