"""Capture: one plain training step becomes one functional graph, its state lifted by name."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tutti.capture.canonical import canonicalize
from tutti.capture.functional import functional_graph
from tutti.capture.gradients import (
    Gradients,
    gradients_there,
    holders_of,
    hooked,
    watched_gradients,
)
from tutti.capture.host_random import no_host_randomness
from tutti.capture.lift import (
    StateTensor,
    create_slots,
    hypers_of,
    optimizers_of,
    state_of,
    swapped,
)
from tutti.capture.other_forms import OTHER_FORMS, in_other_forms
from tutti.capture.precision import computing, refuse_other_weights
from tutti.capture.python_state import (
    Attributes,
    Left,
    Numbers,
    refuse_counters_in_python,
    refuse_kept_values,
)
from tutti.capture.rebound import data_written, take_over
from tutti.capture.refusals import (
    REFUSED_OPS,
    explained,
    python_numbers,
    refuse_changed_numbers,
    refuse_counters,
)
from tutti.capture.regions import watching
from tutti.errors import CaptureError

aten = torch.ops.aten


@dataclass
class Captured:
    """A training step as one functional graph.

    The graph's placeholders are `inputs`, in order: state by name, hyper-parameters by name, then the
    batch's floats as `number.0`, ... and its tensors as `batch.0`, ... Other leaves of the batch are
    constants. Its output is `(returned leaves, new state values)`,
    the latter in the order of `updated`.
    """

    graph: fx.Graph
    owner: nn.Module
    inputs: list[str]
    kinds: dict[str, str]
    state: list[StateTensor]
    updated: list[str]
    returned: TreeSpec
    mode: FakeTensorMode
    guards: list[Any] = field(default_factory=list)

    def placeholder(self, name: str) -> fx.Node:
        """The placeholder of input `name`."""
        return self.placeholders[name]

    @property
    def placeholders(self) -> dict[str, fx.Node]:
        """Placeholders by input name."""
        found = (n for n in self.graph.nodes if n.op == "placeholder")
        return dict(zip(self.inputs, islice(found, len(self.inputs)), strict=True))

    @property
    def output(self) -> tuple[list[Any], list[fx.Node]]:
        """The returned leaves and the new state values."""
        node = self.graph.output_node()
        return node.args[0]  # type: ignore[return-value]


def capture(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: Any,
    batch: Sequence[Any],
    *,
    precision: str = "fp32",
) -> Captured:
    """Trace `train_step(model[, optimizer], *batch)` with fake tensors.

    Nothing real is touched, but for the optimizer's slots: those that are missing are created.
    `precision` is the layout's: what the forward computes in.

    Raises `LayoutError` for weights that do not fit `precision`, and `CaptureError` with the user's line
    for what cannot be captured: a branch on a tensor's value, `.item()`, a shape that depends on values.
    """
    create_slots(optimizer)
    state = state_of(model, optimizer)
    leaves, spec = tree_flatten(tuple(batch))
    mode = FakeTensorMode(
        shape_env=_Symbols(allow_dynamic_output_shape_ops=False),
        static_shapes=True,
        allow_non_fake_inputs=True,
    )
    lifted = _Lifted(train_step, model, optimizer, state, leaves, spec, mode, precision)
    with _use_lazy_graph_module(True):  # only the graphs are used: no code is made for them
        traced = lifted.traced()
        functional = functional_graph(traced, lifted.inputs, mode)
    captured = _collect(functional, lifted)
    lifted.grads.refuse_used(captured.graph.output_node().all_input_nodes)
    lifted.refuse_constants(functional, state)
    weights = {
        s.name: s.tensor.dtype
        for s in state
        if s.kind == "parameter" and s.tensor.is_floating_point()
    }
    refuse_other_weights(precision, weights, frozenset(captured.updated))
    canonicalize(captured.graph, captured.owner, mode)
    lifted.grads.note(lifted.holders)
    return captured


class _Symbols(ShapeEnv):
    """The hyper-parameters as symbols.

    PyTorch notes for its own log which line asked for each guard, and imports its exporter and compiler to
    tell which files are not a user's: a second for each process, and nothing here reads it.
    """

    def _get_user_frame(self) -> FrameType:
        return sys._getframe()  # any one: to an error of PyTorch 2.11 it must be a frame


class _Lifted:
    """The step as a function of its state, hyper-parameters and batch, on fake tensors."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: Any,
        state: list[StateTensor],
        leaves: list[Any],
        spec: TreeSpec,
        mode: FakeTensorMode,
        precision: str,
    ) -> None:
        self.precision = precision
        self.train_step, self.model, self.optimizer = train_step, model, optimizer
        self.state, self.leaves, self.spec, self.mode = state, leaves, spec, mode
        self.hypers = hypers_of(optimizer)
        self.number_leaves = [i for i, x in enumerate(leaves) if isinstance(x, float)]
        self.tensor_leaves = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.names = (
            [s.name for s in state]
            + [h.name for h in self.hypers]
            + [f"number.{k}" for k in range(len(self.number_leaves))]
            + [f"batch.{k}" for k in range(len(self.tensor_leaves))]
        )
        self.inputs = (
            [_fake(s.tensor, mode) for s in state]
            + [_symbol(h.name, h.value, mode) for h in self.hypers]
            + [_symbol(f"number.{k}", leaves[i], mode) for k, i in enumerate(self.number_leaves)]
            + [_fake(leaves[i], mode) for i in self.tensor_leaves]
        )
        self.returned: TreeSpec | None = None
        self.left: list[Left] = []
        self.begun: frozenset[str] = frozenset()  # whose gradients the trace begins with
        self.grads: Gradients
        self.holders = holders_of(model, state)
        self.there = gradients_there(self.holders)

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each input by name."""
        kinds = {s.name: s.kind for s in self.state} | {h.name: "hyper" for h in self.hypers}
        return {n: kinds.get(n, n.partition(".")[0]) for n in self.names}

    def traced(self) -> fx.GraphModule:
        """The trace, if another would find Python's side of the step as this one leaves it."""
        numbers = Numbers(self.train_step)

        def traced_again() -> dict[str, Any]:
            self.trace()
            return numbers.now()

        before = numbers.now()
        self.attributes = Attributes(self.model)
        try:
            traced = self.trace()
            while wanted := self.grads.wanted:
                self.begun |= wanted
                self.attributes.put_back()
                before, traced = numbers.now(), self.trace()
            left = self.left
            refuse_counters_in_python(before, numbers.now(), traced_again)
            refuse_kept_values(left, traced, self.trace)
        finally:
            self.attributes.put_back()
        return traced

    def trace(self) -> fx.GraphModule:
        with self.mode, watching(self.model), explained(), no_host_randomness(), in_other_forms():
            table = {**REFUSED_OPS, **OTHER_FORMS}
            return make_fx(self._run, table, tracing_mode="real")(*self.inputs)

    def _run(self, *flat: Any) -> list[Any]:
        state = dict(zip([id(s.tensor) for s in self.state], flat, strict=False))
        hypers = dict(zip([h.name for h in self.hypers], flat[len(self.state) :], strict=False))
        leaves = list(self.leaves)
        rest = flat[len(self.state) + len(self.hypers) :]
        for i, x in zip([*self.number_leaves, *self.tensor_leaves], rest, strict=True):
            leaves[i] = x
        batch = tree_unflatten(leaves, self.spec)
        with (
            swapped(self.model, self.optimizer, state, hypers) as places,
            data_written(),
            hooked(self.state, flat),
            watched_gradients(
                self.state, flat, self.begun, self.there, self.optimizer
            ) as self.grads,
        ):
            args = (self.model,) if self.optimizer is None else (self.model, self.optimizer)
            before = python_numbers(self.optimizer)
            with _host_min_max(self.optimizer), computing(self.precision, self.model):
                result = self.train_step(*args, *batch)
            self.grads.end()
            put = {id(x): s for s, x in zip(self.state, flat, strict=False)}
            take_over(places, put)
            self.left = self.attributes.left()
            refuse_changed_numbers(self.hypers, hypers)
            refuse_counters(self.optimizer, before)
        out, self.returned = tree_flatten(result)
        return [x.detach() if isinstance(x, Tensor) else x for x in out]

    def refuse_constants(self, functional: fx.GraphModule, state: list[StateTensor]) -> None:
        """A parameter reached past the model would silently be a constant of the graph."""
        own = {s.tensor.untyped_storage().data_ptr(): s.name for s in state if _has_data(s.tensor)}
        for node in functional.graph.nodes:
            if node.op != "get_attr":
                continue
            value = getattr(functional, node.target)
            if _has_data(value) and value.untyped_storage().data_ptr() in own and value.numel():
                name = own[value.untyped_storage().data_ptr()]
                raise CaptureError(
                    f'the step uses the state "{name}" other than through the model it is given',
                    why="it would be frozen at today's value",
                    fix="reach it through the model argument of the step",
                )


def _has_data(x: Any) -> bool:
    from torch.distributed.tensor import DTensor

    if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.device.type == "meta":
        return False
    return type(x) in (Tensor, nn.Parameter) and x.numel() > 0


def _fake(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake of the same global shape, dtype and device; strides are plain."""
    device = x.device
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with mode:
        fake = torch.empty(tuple(x.shape), dtype=x.dtype, device=device)
    return fake.requires_grad_(x.requires_grad)


def _symbol(name: str, value: float, mode: FakeTensorMode) -> Any:
    source, env = ConstantSource(name), mode.shape_env
    assert env is not None
    return env.create_symfloatnode(
        env.create_unspecified_symbol(value, source=source), hint=value, source=source
    )


@contextlib.contextmanager
def _host_min_max(optimizer: Any) -> Iterator[None]:
    """Python's `min` and `max` of step counts and norms inside an optimizer's code stay in the graph."""
    with contextlib.ExitStack() as stack:
        for module in {_home(one) for one in optimizers_of(optimizer)}:
            for name in ("min", "max"):
                patch = mock.patch.object(sys.modules[module], name, _min_max(name), create=True)
                stack.enter_context(patch)
        yield


def _home(optimizer: Optimizer) -> str:
    """The module whose globals the optimizer's code sees (`__module__` may name a public alias)."""
    step: Any = inspect.unwrap(type(optimizer).step)
    return step.__globals__["__name__"]


def _min_max(name: str) -> Callable[..., Any]:
    plain = getattr(builtins, name)
    symbolic = getattr(torch, f"sym_{name}")

    def choose(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and any(isinstance(a, torch.SymFloat | torch.SymInt) for a in args):
            return symbolic(*args)
        return plain(*args, **kwargs)

    return choose


def _collect(functional: fx.GraphModule, lifted: _Lifted) -> Captured:
    """Final `copy_` nodes into inputs become the new state values of the output."""
    graph = functional.graph
    names = dict(zip([n for n in graph.nodes if n.op == "placeholder"], lifted.names, strict=True))
    updates: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in names:
            updates[names[node.args[0]]] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    kinds = lifted.kinds
    written = [n for n in updates if kinds[n] == "batch"]
    if written:
        raise CaptureError(
            f"the step writes into its input {written[0]}",
            fix="clone it before changing it in place",
        )
    output = graph.output_node()
    returned = (
        list(output.args[0]) if isinstance(output.args[0], list | tuple) else [output.args[0]]
    )
    updated = [n for n in lifted.names if n in updates]
    output.args = ((returned, [updates[n] for n in updated]),)
    for node, name in names.items():
        node.meta["name"], node.meta["kind"] = name, kinds[name]
    assert lifted.returned is not None
    env = lifted.mode.shape_env
    assert env is not None
    return Captured(
        graph=graph,
        owner=functional,
        inputs=lifted.names,
        kinds=kinds,
        state=lifted.state,
        updated=updated,
        returned=lifted.returned,
        mode=lifted.mode,
        guards=[g.expr for g in env.guards],
    )


def copied(captured: Captured) -> Captured:
    """The same capture with a graph of its own, to be rewritten for one layout."""
    graph, mapped = fx.Graph(), {}
    result = graph.graph_copy(captured.graph, mapped)
    graph.output(result)
    for old, new in mapped.items():
        new.meta = dict(old.meta)
    return replace(captured, graph=graph)
