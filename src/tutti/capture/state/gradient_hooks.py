"""The user's hooks on gradients of parameters: in a trace, and on a copy of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from tutti.capture.state.lift import StateTensor
from tutti.errors import CaptureError
from tutti.torch_private.module_tables import hooks_of_tensor
from tutti.torch_private.multi_grad_hooks import for_copy, wait_for
from tutti.user_lines import quoted, user_line


def _hooks_of(p: Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks on a parameter's gradient, and those after its accumulation."""
    on, after = hooks_of_tensor(p)
    return list((on or {}).values()), list((after or {}).values())


@contextlib.contextmanager
def hooked(state: Sequence[StateTensor], flat: Sequence[Any]) -> Iterator[None]:
    """Inside, the tensors in place of parameters have the parameters' hooks."""
    with contextlib.ExitStack() as stack:
        for s, x in zip(state, flat, strict=False):
            on, after = _hooks_of(s.tensor)
            for hook in on:
                stack.callback(x.register_hook(_explained(hook, s.name)).remove)
                stack.callback(wait_for(hook, x))
            for hook in after:
                handle = x.register_post_accumulate_grad_hook(_explained(hook, s.name))
                stack.callback(handle.remove)
        yield


def _explained(hook: Any, name: str) -> Any:
    def called(x: Tensor) -> Any:
        try:
            return hook(x)
        except KeyError as error:
            raise CaptureError(
                f'a gradient hook of "{name}" looks up a missing name',
                at=quoted(user_line()),
                why="while the step is captured another tensor stands for the parameter",
                fix="a closure over what belongs to the parameter, or a dict by name",
            ) from error

    return called


def carry_hooks(model: nn.Module, other: nn.Module) -> None:
    """Give the parameters of a copy of `model` its gradient hooks, which a copy drops."""
    waiting: dict[int, Any] = {}
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        on, after = _hooks_of(old)
        for hook in on:
            new.register_hook(for_copy(hook, new, waiting))
        for hook in after:
            new.register_post_accumulate_grad_hook(hook)
