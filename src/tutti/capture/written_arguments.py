"""The refusal of a write into a tensor of the batch: of this call, or state that the step keeps by hand."""

from __future__ import annotations

from tutti.errors import CaptureError


def refused_write(name: str, at: str) -> CaptureError:
    """The error for a write into the argument `name`, or into a tensor in it."""
    fix = (
        "the op that returns a new tensor, as x.div(255) in place of x.div_(255); or a clone before it: "
        f"{name} = {name}.clone()"
    )
    if not name.isidentifier():
        fix = (
            "for a value of this batch the op that returns a new tensor (x.div(255) in place of "
            "x.div_(255)), or a clone before the write; for state that the step keeps (momenta by hand) an "
            "object of your own class with the tensors as attributes, a buffer of the model or "
            "optimizer.state[p] in place of the dict or list; or return new tensors, and pass them to the "
            "next call"
        )
    return CaptureError(
        f"the step writes into its argument {name}",
        at=at,
        why="the ranks hold parts of it, and the caller's tensor, which the script may read after the call, "
        "would stay as it was",
        fix=fix,
    )
