"""Gradients over calls: a step must not depend on the content of `.grad`, as gradients are not state.

A trace starts without gradients, as a first call does; a later call finds those of the call before. The two
are one step if the step clears each such gradient before it reads it, or never reads it. If a trace without
gradients cannot decide that, another one starts with gradients of unknown value, the results of
`tutti::left_gradient`, and no value of the step may depend on them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tutti.capture.backwards import Engine, around_backward
from tutti.capture.patch_table import GRAD, MODULE_ZERO_GRAD, OPTIMIZER_ZERO_GRAD, ZERO
from tutti.capture.state.lift import StateTensor, optimizers_of
from tutti.errors import CaptureError
from tutti.graph.edits.patch import hook_here, replaced
from tutti.torch_private.autograd_engine import version_of
from tutti.torch_private.dispatch_modes import no_torch_function
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.torch_private.module_tables import hooks_of_tensor, parameters_of
from tutti.torch_private.multi_grad_hooks import for_copy, wait_for
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
    there: bool  # other code than the step may have left one
    left: Tensor | None = None  # of unknown value, from an earlier call
    cleared: bool = False  # or set: the first gradient is gone
    reached: bool = False  # one existed at some time
    as_zeros: bool = False  # cleared by `set_to_none=False`: zeros if one existed
    zeros: tuple[Tensor, int] | None = (
        None  # the tensor set to zeros in place, and its version then
    )
    added: str | None = None  # the line of the backward that added to it before it was cleared
    read: str | None = None  # the line that read it before it was cleared
    read_none: bool = False
    unsure: str | None = None  # the line that found zeros, or at a first call none

    @property
    def now(self) -> Tensor | None:
        return _read(self.param)

    def get(self) -> Tensor | None:
        """The gradient that the step reads."""
        grad = self.now
        self.reached |= grad is not None
        if grad is None and self.as_zeros:
            if self.reached:
                grad = torch.zeros_like(self.param.detach())
                _write(self.param, grad)
            elif self.unsure is None:
                self.unsure = user_line()
        elif not self.cleared:
            self.read = user_line() if self.read is None else self.read
            self.read_none |= grad is None
        return grad

    def set(self, value: Tensor | None, *, as_zeros: bool = False) -> None:
        """Set the gradient for the step."""
        self.reached |= self.now is not None
        self.cleared, self.as_zeros = True, as_zeros
        _write(self.param, value)

    def zero(self, grad: Tensor) -> Tensor:
        """`grad.zero_()` for a `grad` that is this gradient, or shares its memory."""
        if self.left is not None and self.now is self.left:
            self.set(torch.zeros_like(self.param.detach()))
        else:
            _ZERO(grad)
            self.cleared = True
        now = self.now
        assert now is not None
        self.zeros = now, version_of(now)
        return grad if grad is not self.left else now

    @property
    def is_zeros(self) -> bool:
        """Whether a later call finds zeros, if it finds any."""
        now = self.now
        if now is None:
            return self.as_zeros
        return self.zeros is not None and self.zeros[0] is now and self.zeros[1] == version_of(now)

    @property
    def stays(self) -> bool:
        """Whether a later call finds the current gradient."""
        return self.now is not None and not self.is_zeros

    @property
    def wanted(self) -> bool:
        """Whether only a trace that starts with a gradient shows if the step depends on it."""
        met = self.stays or self.there or (self.is_zeros and self.read_none and self.reached)
        return self.left is None and self.read is not None and met

    @property
    def grows(self) -> bool:
        """Whether each call adds to it, and none clears it."""
        return self.stays and not self.cleared


class Gradients:
    """The gradients of a step's parameters while it is traced.

    Args:
        params: by name, the parameters' tensors in the trace.
        own: by name, the parameters of the user's model.
        left: the names of those that start with a gradient of an earlier call.
        there: the names of those for which other code may have left one.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        left: Collection[str],
        there: Collection[str],
        optimizer: Any,
    ) -> None:
        optimizers = optimizers_of(optimizer)
        held = {id(p) for one in optimizers for g in one.param_groups for p in g["params"]}
        self._all = {
            id(p): Gradient(n, p, not optimizers or id(p) in held, n in there)
            for n, p in params.items()
        }
        self._own = {id(p) for p in own.values()}
        self._optimizers = {id(one) for one in optimizers}
        self._storages: dict[int, Gradient] = {}
        self._stay: list[Gradient] = []
        # The names of gradients with which another trace must start.
        self.wanted: frozenset[str] = frozenset()
        for one in self._all.values():
            if one.name in left:
                one.left = _left_gradient(one.param.detach(), one.name)
                one.reached = True
            _write(one.param, one.left)

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
        """Note the gradients left at the end of the step, and raise for a step that depends on them."""
        every = list(self._all.values())
        for one in every:
            one.reached |= one.now is not None
        self._stay = [one for one in every if one.stays]
        self.wanted = frozenset(one.name for one in every if one.wanted)
        unsure = [one for one in every if one.unsure is not None and one.reached]
        if unsure:
            raise CaptureError(
                f"the step reads gradients that it has set to zeros: {_named(unsure)}",
                at=quoted(unsure[0].unsure or ""),
                why="at the first call there are none, at later ones there are",
                fix="zero_grad(), without set_to_none=False",
            )
        grows = [one for one in every if one.grows and one.held and not one.wanted]
        if grows:
            raise _refused(grows)

    def refuse_used(self, outputs: Sequence[Any]) -> None:
        """Raise if values of the functional graph depend on gradients of an earlier call."""
        seen: set[fx.Node] = set()
        todo = [x for x in outputs if isinstance(x, fx.Node)]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        used = {str(n.args[1]) for n in seen if n.target is _left_gradient}
        if used:
            raise _refused([one for one in self._all.values() if one.name in used])

    def note(self, holders: Mapping[str, Holder]) -> None:
        """Note the gradients that the step leaves and reads; raise if another step reads one of them."""
        stay = {one.name for one in self._stay}
        for one in self._all.values():
            if one.name not in holders:
                continue
            module, key = holders[one.name]
            known = _MET.setdefault(module, {})
            leaves, reads = known.get(key, (False, None))
            leaves |= one.name in stay
            if reads is None and one.left is None:
                reads = one.read
            if leaves and reads is not None:
                raise CaptureError(
                    f"one step leaves gradients that another reads: {_named([one])}",
                    at=quoted(reads),
                    why=_WHY,
                    fix=_FIX,
                )
            known[key] = leaves, reads


# A module, and the name of its parameter.
Holder = tuple[nn.Module, str]
# Whether a step leaves the gradient of a parameter, and the line of one that reads it before it is cleared.
_MET: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[bool, str | None]]] = (
    weakref.WeakKeyDictionary()
)


def holders_of(model: nn.Module, state: Sequence[StateTensor]) -> dict[str, Holder]:
    """By name, the first module that has each parameter."""
    names = {id(s.tensor): s.name for s in state if s.kind == "parameter"}
    found: dict[str, Holder] = {}
    for module in model.modules():
        for key, p in parameters_of(module).items():
            if p is not None and id(p) in names:
                found.setdefault(names[id(p)], (module, key))
    return found


def _grad_of(module: nn.Module, key: str) -> Tensor | None:
    p = parameters_of(module)[key]
    return None if p is None else p.grad


def gradients_there(holders: Mapping[str, Holder]) -> frozenset[str]:
    """The names of parameters for which other code may have left a gradient."""
    return frozenset(
        name
        for name, (module, key) in holders.items()
        if _MET.get(module, {}).get(key, (False, None))[0] or _grad_of(module, key) is not None
    )


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
    left: Collection[str],
    there: Collection[str],
    optimizer: Any,
) -> Iterator[Gradients]:
    """Yield the gradients of the parameters behind the tensors in `flat`; clear them at the end."""
    pairs = [
        (s, x)
        for s, x in zip(state, flat, strict=False)
        if s.kind == "parameter" and s.tensor.requires_grad
    ]
    params = {s.name: x for s, x in pairs}
    grads = Gradients(params, {s.name: s.tensor for s, _ in pairs}, left, there, optimizer)

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
