"""State made explicit: every parameter, buffer, optimizer slot and hyper-parameter of a step, by name."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.state.first_step import (
    inner_optimizers,
    owns_groups,
    part_from_weights,
    pure_wrappers,
    refuse_kind,
    take_first_step,
)
from tutti.capture.state.first_values import first_values
from tutti.capture.state.free_numbers import is_free_number
from tutti.capture.state.fused import as_ops, qualifies
from tutti.capture.state.missing_weights import not_of_the_model
from tutti.capture.state.trial_steps import trial
from tutti.errors import CaptureError, TuttiError
from tutti.torch_private.dispatch_modes import TorchDispatchMode
from tutti.torch_private.module_tables import buffers_of, parameters_of
from tutti.torch_private.op_tables import schema_of
from tutti.torch_private.optimizer_marks import UNCHECKED, hooks_off, stepped_mark_kept
from tutti.torch_private.pytrees import tree_leaves, tree_map

# Hyper-parameters that schedules change: inputs of the graph. Others are constants of one trace.
SCHEDULED = ("lr", "weight_decay", "momentum", "betas")


@dataclass(frozen=True)
class StateTensor:
    """One tensor that outlives a step.

    `kind` is "parameter", "buffer" or "slot"; a slot names the parameter it belongs to as `owner`. A tied
    parameter has its first name; `others` are the rest.
    """

    name: str
    kind: str
    tensor: Tensor = field(repr=False, compare=False)
    owner: str = ""
    slot: str = ""
    others: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter that may change between steps: its place and its current value."""

    name: str
    optimizer: Optimizer = field(repr=False, compare=False)
    group: int = 0
    key: str = ""
    item: int | None = None

    @property
    def raw(self) -> Any:
        """The optimizer's current entry: a number, or during a trace a symbol."""
        value = self.optimizer.param_groups[self.group][self.key]
        return value if self.item is None else value[self.item]

    @property
    def value(self) -> float:
        """The value now, read from the optimizer."""
        return float(self.raw)


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """The optimizers in `optimizer` (one, a list, a tuple or a dict, or none), and those that they call."""
    found = [] if optimizer is None else tree_leaves(optimizer)
    for one in found:
        if not isinstance(one, Optimizer):
            raise _no_optimizer(one)
    every = [inner for one in found for inner in inner_optimizers(one)]
    return list({id(one): one for one in every}.values())


def _no_optimizer(given: Any) -> TuttiError:
    """The error for another object in the place of an optimizer."""
    kind, fix = type(given).__name__, "tutti.distribute(train_step, model, optimizer)"
    held = [name for name, x in getattr(given, "__dict__", {}).items() if isinstance(x, Optimizer)]
    if held:
        fix = (
            f"tutti.distribute(train_step, model, wrapper.{held[0]}); the step reaches the {kind} "
            "by a closure or a global"
        )
    return TuttiError(f"expected a torch.optim.Optimizer, got {kind}", fix=fix)


def called_optimizers(optimizer: Any) -> list[Optimizer]:
    """Those of `optimizers_of`, and then those without groups and state of their own, which call others."""
    return [*optimizers_of(optimizer), *wrappers_of(optimizer)]


def wrappers_of(optimizer: Any) -> list[Optimizer]:
    """The optimizers in `optimizer` without groups and state of their own, which call others."""
    found = [] if optimizer is None else tree_leaves(optimizer)
    every = [one for outer in found for one in pure_wrappers(outer)]
    return list({id(one): one for one in every}.values())


def state_of(model: nn.Module, optimizer: Any) -> list[StateTensor]:
    """Every state tensor, each once: parameters, then buffers, then slots in the parameters' order.

    An optimizer around another (Lookahead) may have the other's table of slots as its own: it is read once.
    """
    state = [StateTensor(n, "parameter", p, others=others) for n, others, p in _parameters(model)]
    names = {id(s.tensor): s.name for s in state}
    state += [StateTensor(n, "buffer", b) for n, b in model.named_buffers()]
    optimizers = optimizers_of(optimizer)
    read: set[tuple[str, int]] = set()
    for one in optimizers:
        for group in one.param_groups:
            for param in group["params"]:
                owner = names.get(id(param))
                if owner is None:
                    raise not_of_the_model(one, param, optimizers)
                for slot, value in one.state.get(param, {}).items():
                    name = f"optim.{owner}.{slot}"
                    if isinstance(value, Tensor) and (name, id(value)) not in read:
                        read.add((name, id(value)))
                        state.append(StateTensor(name, "slot", value, owner, slot))
    return state


def _parameters(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...], Tensor]]:
    """Every parameter once: its first name, the other ones, and itself."""
    names: dict[int, list[str]] = {}
    found: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    for key, (first, *others) in names.items():
        yield first, tuple(others), found[key]


def hypers_of(optimizer: Any) -> list[Hyper]:
    """The scheduled hyper-parameters of every group."""
    hypers = []
    for k, one in enumerate(optimizers_of(optimizer)):
        prefix = f"optim{k}" if k else "optim"
        for g, group in enumerate(one.param_groups):
            for key in SCHEDULED:
                value = group.get(key)
                name = f"{prefix}.{g}.{key}"
                if is_number(value):
                    hypers.append(Hyper(name, one, g, key))
                elif isinstance(value, list | tuple) and all(map(is_number, value)):
                    hypers += [Hyper(f"{name}.{i}", one, g, key, i) for i in range(len(value))]
    return hypers


def numbers(
    optimizer: Any, leaves: Sequence[Any], python: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Every number that is an input of the graph, by name: hyper-parameters, those of the step's own
    `python`, and those of the batch."""
    values = {h.name: h.value for h in hypers_of(optimizer)} | dict(python or {})
    free = [+x for x in leaves if is_free_number(x)]
    return values | {f"number.{k}": x for k, x in enumerate(free)}


def is_scheduled(key: str, value: Any) -> bool:
    """Whether an option of a group is a number, or a few numbers, that schedules change."""
    several = isinstance(value, list | tuple) and all(map(is_number, value))
    return key in SCHEDULED and (several or is_number(value))


def names_of(model: nn.Module) -> dict[int, str]:
    """By id, the name of each parameter."""
    return {id(p): name for name, p in model.named_parameters()}


def is_number(value: Any) -> bool:
    """Whether a hyper-parameter is one number: a float, an int, or a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_dampening(optimizer: Optimizer) -> None:
    """Refuse dampening: SGD's momentum starts at the first gradient, undamped, unlike any first value."""
    for group in optimizer.param_groups:
        if group.get("momentum") and group.get("dampening"):
            raise CaptureError(
                f"SGD with momentum and dampening={group['dampening']} takes a first step of another form",
                why="the captured step is the same at every call; the first momentum would be damped",
                fix="dampening=0, or take the first step before the model is distributed",
            )


class Undo(TorchDispatchMode):
    """Keeps the first value of every tensor that an operation overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for arg, value in zip(schema_of(func).arguments, args, strict=False):
            if arg.alias_info is not None and arg.alias_info.is_write:
                for t in tree_leaves(value):
                    if isinstance(t, Tensor) and id(t) not in self.first:
                        self.first[id(t)] = (t, t.detach().clone())
        return func(*args, **kwargs)

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, first in self.first.values():
                if tensor.shape == first.shape:
                    tensor.copy_(first)
                else:  # transposed in place
                    tensor.data = first


def create_slots(optimizer: Any) -> None:
    """Let each optimizer create its slots, with their values before its first step; keep the weights.

    Takes a step with zero gradients, and restores the first value of every tensor that it overwrote.
    """
    for one in optimizers_of(optimizer):
        refuse_kind(one)
        places = [
            (g, j) for g, group in enumerate(one.param_groups) for j in range(len(group["params"]))
        ]
        known = _WITHOUT_SLOTS.setdefault(one, set())
        without = {
            (g, j): p
            for g, j in places
            if not one.state.get(p := one.param_groups[g]["params"][j]) and p.requires_grad
        }
        fresh = [p for place, p in without.items() if place not in known]
        if not fresh:
            continue
        _refuse_dampening(one)
        kept = [(p, p.grad) for g in one.param_groups for p in g["params"]]
        undo = Undo()
        try:
            for p, _ in kept:
                p.grad = None
            for p in fresh:
                p.grad = torch.zeros_like(p)
            with undo, trial(one), without_hooks(one), first_values(one, fresh), _at_first(one):
                take_first_step(one, fresh)
        finally:
            for p, grad in kept:
                p.grad = grad
            undo.undo()
        part_from_weights(one, fresh)
        known.update(place for place, p in without.items() if not one.state.get(p))


# By optimizer, the group and position of each parameter that a first step has left without slots.
_WITHOUT_SLOTS: WeakKeyDictionary[Optimizer, set[tuple[int, int]]] = WeakKeyDictionary()


@contextlib.contextmanager
def _at_first(optimizer: Optimizer) -> Iterator[None]:
    """Set options under which slots get their values before the first step.

    Weight decay would enter a slot that starts as a copy of the gradient. Fused kernels start with
    uninitialized slots, and refuse the meta device.
    """
    plain = {"weight_decay": 0.0, "fused": False}
    kept = [(g, k, g[k]) for g in optimizer.param_groups for k in plain if g.get(k)]
    try:
        for group, key, _ in kept:
            group[key] = plain[key]
        yield
    finally:
        for group, key, value in kept:
            group[key] = value


def place_counts(optimizer: Optimizer) -> None:
    """Move counts and other single numbers to the device that a fused or a capturable step needs.

    PyTorch keeps them on the CPU for other steps, such as those before the capture, and in `load_state_dict`.
    """
    for group in optimizer.param_groups:
        fused = group.get("fused")
        for p in group["params"]:
            if not (fused or ("capturable" in group and p.device.type != "cpu")):
                continue
            slots = optimizer.state.get(p, {})
            for key, x in slots.items():
                if isinstance(x, Tensor) and not x.dim() and key in _NUMBERS:
                    wide = fused and key == "step"
                    slots[key] = x.to(p.device, torch.float32 if wide else x.dtype)


# The slots of one number of PyTorch's own optimizers.
_NUMBERS = ("step", "mu_product", "eta", "mu")


@contextlib.contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Hide a step from the count that schedulers watch, and from users' hooks."""
    step = optimizer.__dict__.pop("step", None)
    try:
        with stepped_mark_kept(optimizer), hooks_off(optimizer):
            yield
    finally:
        if step is not None:
            optimizer.__dict__["step"] = step


@dataclass(frozen=True)
class SwappedTensor:
    """A place in a model or an optimizer that holds a tensor, and the tensor put there."""

    now: Callable[[], Any]
    put: Tensor


@contextlib.contextmanager
def swapped(
    model: nn.Module, optimizer: Any, tensors: dict[int, Tensor], hypers: dict[str, Any]
) -> Iterator[list[SwappedTensor]]:
    """Inside, model and optimizer hold `tensors` (by id of the tensor they replace) and `hypers`.

    Yields all places of these tensors.

    Inside, optimizers call PyTorch's fused kernels, as ops of the graph, if these suit all of their
    parameters; else they take their plain path: one tensor at a time, one form of graph.
    """
    undo: list[Any] = []
    places: list[SwappedTensor] = []
    try:
        for module in model.modules():
            tables: Any = (parameters_of(module), buffers_of(module))
            for table in tables:
                for name, old in table.items():
                    if old is not None and id(old) in tensors:
                        undo.append((table, name, old))
                        table[name] = tensors[id(old)]
                        places.append(SwappedTensor(partial(table.get, name), table[name]))
        # A wrapper finds its slots by the parameters in the groups of another.
        for one in sorted(optimizers_of(optimizer), key=owns_groups):
            places += _swap_optimizer(one, tensors, undo)
        for hyper in hypers_of(optimizer):
            group = hyper.optimizer.param_groups[hyper.group]
            if hyper.name not in hypers:
                continue
            if hyper.item is None:
                group[hyper.key] = hypers[hyper.name]
            else:
                values = list(group[hyper.key])
                values[hyper.item] = hypers[hyper.name]
                group[hyper.key] = tuple(values)
        with as_ops():
            yield places
    finally:
        for entry in reversed(undo):
            if len(entry) == 3:
                entry[0][entry[1]] = entry[2]
            else:
                vars(entry[0]).pop(UNCHECKED, None)
                vars(entry[0]).update(entry[1])


def _swap_optimizer(
    one: Optimizer, tensors: dict[int, Tensor], undo: list[Any]
) -> list[SwappedTensor]:
    kept = ("state", "param_groups", UNCHECKED)
    undo.append((one, {k: v for k, v in vars(one).items() if k in kept}))
    fused = qualifies(one)
    state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    groups = []
    for group in one.param_groups:
        params: list[Any] = [tensors.get(id(p), p) for p in group["params"]]
        plain = {"fused": fused} if "fused" in group else {}
        if "foreach" in group and _is_of_pytorch(one):
            plain["foreach"] = False
        on_cpu = all(p.device.type == "cpu" for p in params)
        if "capturable" in group:
            plain["capturable"] = not on_cpu
        groups.append({**group, **plain, "params": params})
        for old, new in zip(group["params"], params, strict=True):
            slots = one.state.get(old, {})
            state[new] = tree_map(
                lambda v: tensors.get(id(v), v) if isinstance(v, Tensor) else v, dict(slots)
            )
    put = {id(x) for x in tensors.values()}
    places = [
        SwappedTensor(partial(_slot, one, p, key), x)
        for p, slots in state.items()
        for key, x in slots.items()
        if id(x) in put
    ]
    state.update({k: v for k, v in one.state.items() if not isinstance(k, Tensor)})
    one.state = state
    if owns_groups(one):
        one.param_groups = groups
    return places


def _is_of_pytorch(one: Optimizer) -> bool:
    """Whether PyTorch's own step takes its options: in another's, `foreach` may choose other arithmetic."""
    kinds = type(one).__mro__
    return any(k.__module__.startswith("torch.optim.") and k is not Optimizer for k in kinds)


def _slot(one: Optimizer, p: Tensor, key: str) -> Any:
    return one.state.get(p, {}).get(key)
