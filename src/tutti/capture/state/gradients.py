"""Gradients over calls: the gradients of a step's parameters while it is traced.

A trace knows which gradients the call finds on one device (`kept_gradients`): none, zeros, or a value of an
earlier call. It starts without them, and without a trace of them in the graph: zeros appear where the step
reads them. If the step reads a value before it clears it, another trace starts with gradients of unknown
value, the results of `tutti::left_gradient`, and no value of the step may depend on them.

If the step would find such a gradient at its next call only, a trace for that call starts with it: it refuses
the step that would depend on it, and mostly serves for both calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tutti.capture.backwards import Engine, around_backward
from tutti.capture.patch_table import GRAD, MODULE_ZERO_GRAD, OPTIMIZER_ZERO_GRAD, ZERO
from tutti.capture.state.kept_gradients import THERE, VALUE, Kept, Question, is_so
from tutti.capture.state.lift import StateTensor, called_optimizers, optimizers_of
from tutti.errors import CaptureError
from tutti.graph.analysis.order import ancestors
from tutti.graph.edits.patch import hook_here, replaced
from tutti.torch_private.autograd_engine import version_of
from tutti.torch_private.dispatch_modes import no_torch_function
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.torch_private.storages import memory_id
from tutti.user_lines import quoted, user_line

_GRAD: Any = Tensor.grad
_ZERO: Any = Tensor.zero_
_FIX = (
    "clear all gradients that the backward reaches at the top of the step: model.zero_grad(); "
    "to accumulate, do it inside one step over parts of the batch"
)
_WHY = "gradients are not state that outlives a step"

_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_LIBRARY.define("left_gradient(Tensor like, str name) -> Tensor")


@torch.library.register_fake("tutti::left_gradient", lib=_LIBRARY)
def _fake_left_gradient(like, name):
    return torch.empty_like(like)


# The gradient of a parameter that an earlier call left, of unknown value.
_left_gradient = torch.ops.tutti.left_gradient.default


def _read(x: Tensor) -> Tensor | None:
    with no_torch_function():
        return _GRAD.__get__(x)


plain_gradient = _read  # does not count as a read by the step


def _write(x: Tensor, value: Tensor | None) -> None:
    with no_torch_function():
        _GRAD.__set__(x, value)


@dataclass(eq=False)
class Gradient:
    """Knowledge of one parameter's `.grad` during a trace."""

    name: str
    param: Tensor
    held: bool  # an optimizer of the step holds the parameter, or the step has none
    found: Kept  # before the call
    left: Tensor | None = None  # of unknown value, from an earlier call
    ahead: bool = False  # `left` is one that only a later call finds
    cleared: bool = False  # or set: the first gradient is gone
    reached: bool = False  # one came to be in this call
    as_zeros: bool = False  # zeros where it is read: found, or cleared by `set_to_none=False`
    zeros: tuple[Tensor, int] | None = (
        None  # the tensor set to zeros in place, and its version then
    )
    added: str | None = None  # the line of the backward that added to it before it was cleared
    read: str | None = None  # the line that read it before it was cleared
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.as_zeros = self.found is Kept.ZEROS and self.left is None

    @property
    def now(self) -> Tensor | None:
        return _read(self.param)

    def _ask(self, what: str) -> bool:
        """The answer to a question about the gradient before the call."""
        if self.ahead:
            return True
        self.asked.add(what)
        return is_so((self.name, what), {self.name: self.found})

    def get(self) -> Tensor | None:
        """The gradient that the step reads."""
        grad = self.now
        self.reached |= grad is not None and grad is not self.left
        if not self.cleared:
            if grad is None or self.left is not None:
                self._ask(THERE)
            if grad is not None or self.as_zeros:
                self._ask(VALUE)
            self.read = user_line() if self.read is None else self.read
        if grad is None and self.as_zeros and (self.reached or self._ask(THERE)):
            grad = torch.zeros_like(self.param.detach())
            _write(self.param, grad)
            self.zeros = grad, version_of(grad)
        return grad

    def set(self, value: Tensor | None, *, as_zeros: bool = False) -> None:
        """Set the gradient for the step."""
        now = self.now
        self.reached |= now is not None and now is not self.left
        self.cleared, self.as_zeros = True, as_zeros
        _write(self.param, value)

    def zero(self, grad: Tensor) -> Tensor:
        """`grad.zero_()` for a `grad` that is this gradient, or shares its memory."""
        now = self.now
        if self.left is not None and now is self.left:
            self.set(None, as_zeros=True)
            return grad
        _ZERO(grad)
        self.cleared = True
        assert now is not None
        self.zeros = now, version_of(now)
        return grad

    @property
    def _is_untouched(self) -> bool:
        """Whether an earlier call has left the current gradient."""
        now = self.now
        if now is None:
            return not self.cleared
        return now is self.left and not version_of(now)

    @property
    def end(self) -> Kept:
        """What a later call finds."""
        now = self.now
        if self._is_untouched:
            return Kept.AS_BEFORE
        if now is not None:
            zeros = self.zeros
            is_zeros = zeros is not None and zeros[0] is now and zeros[1] == version_of(now)
            return Kept.ZEROS if is_zeros else Kept.VALUE
        if not self.as_zeros:
            return Kept.NONE
        return Kept.ZEROS if self.reached else Kept.ZEROED

    @property
    def wanted(self) -> bool:
        """Whether the step reads a value that an earlier call has left, without which the trace began."""
        return self.left is None and self.read is not None and self.found is Kept.VALUE

    @property
    def expected(self) -> bool:
        """Whether a later call may read such a value, and finds that of this call."""
        return self.left is None and self.read is not None and self.end is Kept.VALUE

    @property
    def grows(self) -> bool:
        """Whether each call adds to it, and none clears it."""
        return self.end is Kept.VALUE and not self.cleared


class Gradients:
    """The gradients of a step's parameters while it is traced.

    Args:
        params: by name, the parameters' tensors in the trace.
        found: by name, what the call finds.
        left: the names of those that start with a gradient of an earlier call.
        ahead: the names of those that only a later call finds.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        found: Mapping[str, Kept],
        left: Collection[str],
        ahead: Collection[str],
        optimizer: Any,
    ) -> None:
        optimizers = optimizers_of(optimizer)
        held = {id(p) for one in optimizers for g in one.param_groups for p in g["params"]}
        self._all: dict[int, Gradient] = {}
        self._optimizers = {id(one) for one in called_optimizers(optimizer)}
        self._storages: dict[int, Gradient] = {}
        self.ends: dict[str, Kept] = {}
        self.answers: dict[Question, bool] = {}
        # The names of gradients with which another trace must start, and with which one for later calls must.
        self.wanted: frozenset[str] = frozenset()
        self.expected: frozenset[str] = frozenset()
        for n, p in params.items():
            with_left = n in left or n in ahead
            before = _left_gradient(p.detach(), n) if with_left else None
            is_held, kept = not optimizers or id(p) in held, found.get(n, Kept.NONE)
            self._all[id(p)] = Gradient(n, p, is_held, kept, before, n in ahead)
            _write(p, before)

    def get(self, x: Tensor) -> Tensor | None:
        one = self._all.get(id(x))
        if one is None:
            return _read(x)
        grad = one.get()
        if grad is not None:
            self._storages[memory_id(grad)] = one
        return grad

    def set(self, x: Tensor, value: Tensor | None) -> None:
        one = self._all.get(id(x))
        if one is None:
            _write(x, value)
        else:
            one.set(value)

    def zero(self, x: Tensor) -> Tensor:
        one = self._storages.get(memory_id(x)) if type(x) is FakeTensor else None
        now = None if one is None else one.now
        if one is None or now is None or now.numel() != x.numel():
            return _ZERO(x)
        same = memory_id(now) == memory_id(x)
        return one.zero(x) if same else _ZERO(x)

    def clear(self, x: Tensor, set_to_none: bool) -> None:
        one = self._all.get(id(x))
        if one is not None:
            one.set(None, as_zeros=not set_to_none)
        elif _read(x) is not None:
            _write(x, None)

    def after_backward(self) -> None:
        for one in self._all.values():
            now = one.now
            changed = now is not None and (now is not one.left or version_of(now) > 0)
            if changed and not one.cleared and one.added is None:
                one.added = user_line()

    def before_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers:
            raise CaptureError(
                f"the step calls an optimizer that it was not given ({type(optimizer).__name__})",
                at=quoted(user_line()),
                why="it would update the parameters once, while the step is captured",
                fix="tutti.distribute(train_step, model, [optimizer, ...]): all that the step uses",
            )

    def end(self) -> None:
        """Note the gradients at the end of the step; raise for those that grow from call to call."""
        every = list(self._all.values())
        self.ends = {one.name: one.end for one in every}
        self.answers = {
            (one.name, what): is_so((one.name, what), {one.name: one.found})
            for one in every
            for what in sorted(one.asked)
        }
        self.wanted = frozenset(one.name for one in every if one.wanted)
        self.expected = frozenset(one.name for one in every if one.expected)
        again = self.wanted | self.expected
        grows = [one for one in every if one.grows and one.held and one.name not in again]
        if grows:
            raise _refused(grows)

    def refuse_used(self, results: Sequence[Any]) -> None:
        """Raise if `results` of the functional graph depend on gradients of an earlier call."""
        read = ancestors(x for x in results if isinstance(x, fx.Node))
        used = {str(n.args[1]) for n in read if n.target is _left_gradient}
        if used:
            raise _refused([one for one in self._all.values() if one.name in used])


def _named(found: Sequence[Gradient]) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f'of "{found[0].name}"{more}'


def _refused(found: Sequence[Gradient]) -> CaptureError:
    one = found[0]
    verb = "reads" if one.added is None else "adds to"
    at = one.added or one.read or ""
    read = f"; they are read at {one.read}" if one.read and one.read != at else ""
    return CaptureError(
        f"the step {verb} gradients that an earlier call left: {_named(found)}",
        at=quoted(at),
        why=_WHY + read,
        fix=_FIX,
    )


@contextlib.contextmanager
def watched_gradients(
    state: Sequence[StateTensor],
    flat: Sequence[Any],
    found: Mapping[str, Kept],
    left: Collection[str],
    ahead: Collection[str],
    optimizer: Any,
) -> Iterator[Gradients]:
    """Yield the gradients of the parameters behind the tensors in `flat`; clear them at the end."""
    both = zip(state, flat, strict=False)
    params = {s.name: x for s, x in both if s.kind == "parameter"}
    grads = Gradients(params, found, left, ahead, optimizer)

    def looking(run: Engine) -> Engine:
        def backward(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            grads.after_backward()
            return result

        return backward

    def optimizer_zero(self: Optimizer, set_to_none: bool = True) -> None:
        for p in [p for group in self.param_groups for p in group["params"]]:
            grads.clear(p, set_to_none)

    def module_zero(self: nn.Module, set_to_none: bool = True) -> None:
        for p in self.parameters():
            grads.clear(p, set_to_none)

    hook = register_optimizer_step_pre_hook(hook_here(grads.before_update))
    try:
        with (
            around_backward(looking),
            replaced(
                (GRAD, property(grads.get, grads.set, lambda x: grads.set(x, None))),
                (OPTIMIZER_ZERO_GRAD, optimizer_zero),
                (MODULE_ZERO_GRAD, module_zero),
                (ZERO, lambda x: grads.zero(x)),
            ),
        ):
            yield grads
    finally:
        hook.remove()
        for p in params.values():
            p.grad = None
