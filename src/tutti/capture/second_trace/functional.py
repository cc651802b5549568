"""The second trace: the step without mutation, with one op per tensor of a list and tutti's random ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize

from tutti.capture.patch_table import NODE_CARRIED
from tutti.capture.second_trace.attention_dropout import (
    backward,
    dropout_of,
    has_dropout,
    laid_out,
)
from tutti.capture.second_trace.constant_writes import refuse_constant_writes
from tutti.capture.second_trace.kept_orders import order_may_change, written_in_order
from tutti.capture.second_trace.overwrites import overwrites
from tutti.capture.second_trace.random_ops import (
    NO_GENERATOR,
    RANDOM_OPS,
    answer,
    is_random,
    refused_draw,
)
from tutti.capture.second_trace.sharing import MemorySharing
from tutti.capture.second_trace.verbatim import Copying, copyable
from tutti.errors import CaptureError, TuttiError
from tutti.graph.edits.edit import NOTES
from tutti.graph.edits.patch import replaced
from tutti.graph.ops.fused_updates import BY_RECORDED, Kernel
from tutti.graph.ops.plain_attention import PLAIN_FORMS
from tutti.graph.randomness.draw import draw
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.op_tables import OpOverload, overload_name, schema_of
from tutti.torch_private.tracing import PythonKeyTracer, trace
from tutti.user_lines import quoted

aten = torch.ops.aten
_CARRIED = (*NOTES, "output_of")


class _Replay(Copying):
    """Runs the first trace's graph node by node, so that the second trace inherits its notes."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        graph, memory = module.graph, MemorySharing(list(module.graph.nodes))
        refuse_constant_writes(graph, memory, _BATCH_NORMS)
        known = (_has_own_form, _BATCH_NORMS)
        renamed = overwrites(graph, memory, mode, *known)
        super().__init__(module, copyable(graph, memory, *known, renamed.memory), renamed)
        self.extra_traceback = False
        self.node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        try:
            return super().run_node(n)
        except TuttiError:
            raise
        except Exception as error:
            first = str(error).strip().partition("\n")[0] or "no message"
            raise CaptureError(
                f"{type(error).__name__} while the writes of the step became new values: {first}",
                at=self._line,
                why=f"{n.target} has passed the first trace, but not the second, where a write makes a new "
                "tensor: this is a mistake of tutti",
                fix="write into no view around this line: clone the tensor first, or take an op that returns "
                "a new one (x = x.mul(2) for x.mul_(2)); report it with the traceback of the cause",
            ) from error

    @property
    def _line(self) -> str:
        """The user's line of the current node."""
        return quoted(self.node.meta.get("source", "")) if self.node is not None else ""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant, as a value known to functionalization: otherwise writes to its copies would remain."""
        value = super().get_attr(target, args, kwargs)
        return aten.lift_fresh_copy.default(value) if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        assert self.node is not None
        if is_random(target, args, kwargs):
            if kwargs.get("generator") is not None:
                raise CaptureError(
                    f"{target} draws from a generator that the step passes",
                    at=self._line,
                    why="a step draws numbers that do not depend on the layout, whatever the state of that "
                    "generator is: one that is seeded at every call would not give the same numbers again",
                    fix=NO_GENERATOR,
                )
            stream = self.node.meta["stream"]
            made = answer(lambda *a: draw(*a, stream), target, args, kwargs)
            return made if target in RANDOM_OPS else laid_out(made, self.node.meta["val"])
        if has_dropout(target, args, kwargs):
            return laid_out(backward(target, args, kwargs), self.node.meta["val"])
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and (
            "attention" not in str(target) or dropout_of(target, args, kwargs)
        ):
            raise refused_draw(target, self._line)
        if isinstance(target, OpOverload) and schema_of(target).name.startswith("aten::_foreach_"):
            return apart(target, args, kwargs)
        if target in BY_RECORDED:
            return _one_by_one(BY_RECORDED[target], args, kwargs)
        if target in _HIDING:
            raise CaptureError(
                f"{target} is not supported",
                at=self._line,
                why="it writes running statistics that its schema does not name",
                fix="call torch.nn.functional.batch_norm",
            )
        if target in _BATCH_NORMS:
            return _batch_norm(*args)
        if order_may_change(target, args, kwargs, self.node.meta.get("val")):
            return written_in_order(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def _running_statistics(node: fx.Node) -> tuple[int, ...]:
    """The positions of the operands that a batch norm writes: none in evaluation."""
    return (3, 4) if node.args[5] else ()


_BATCH_NORMS = dict.fromkeys(
    (
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
    ),
    _running_statistics,
)

_HIDING = (aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)


def _has_own_form(target: Any) -> bool:
    """Whether the second trace may have another form of an op than the first."""
    random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return random or target in RANDOM_OPS or target in PLAIN_FORMS or "_foreach_" in str(target)


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    """Batch norm with visible writes to the running statistics: the plain op hides them."""
    training, momentum, eps = rest
    if mean is None or not training:
        return aten.native_batch_norm.default(x, weight, bias, mean, var, training, momentum, eps)
    out, *saved, new_mean, new_var = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, mean, var, training, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, *saved


def apart(target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A `_foreach_` op as one op per tensor."""
    name = schema_of(target).name.removeprefix("aten::_foreach_")
    if overload_name(target) == "ScalarAndTensor":  # a number to several powers
        return [torch.pow(args[0], x) for x in args[1]]
    base, writes = name.rstrip("_"), name.endswith("_")
    results = []
    for i, x in enumerate(args[0]):
        rest = [a[i] if isinstance(a, list | tuple) else a for a in args[1:]]
        keys = {k: v[i] if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
        if base in ("addcmul", "addcdiv") and len(rest) > 2:
            keys["value"] = rest.pop()
        if base in _OTHERWISE:
            result = _one(base, x, rest, keys)
            results.append(x.copy_(result) if writes else result)
        else:
            single: Any = getattr(torch.Tensor, name, None) or getattr(torch, name)
            results.append(single(x, *rest, **keys))
    return None if writes else results


# For one tensor these have another form than a method of this name.
_OTHERWISE = ("maximum", "minimum", "norm", "powsum", "copy", "zero")


def _one(base: str, x: Tensor, rest: list[Any], keys: dict[str, Any]) -> Tensor:
    """The result for one tensor, in new memory."""
    if base == "norm":
        return torch.linalg.vector_norm(x, *rest, **keys)
    if base == "powsum":
        x = x if keys.get("dtype") is None else x.to(keys["dtype"])
        return (x.abs() ** (rest[0] if rest else 2)).sum()
    if base == "copy":
        return rest[0].to(x.dtype).expand(x.shape)
    if base == "zero":
        return torch.zeros_like(x)
    if isinstance(rest[0], Tensor):
        return getattr(torch, base)(x, rest[0])
    return x.clamp(min=rest[0]) if base == "maximum" else x.clamp(max=rest[0])


def _one_by_one(kernel: Kernel, lists: Sequence[Sequence[Any]], numbers: dict[str, Any]) -> None:
    """A fused update of many parameters as one call per parameter, so that each may have its own split."""
    for mine, old in kernel.one_by_one(lists):
        for x, new in zip(old, kernel.op(*mine, **numbers), strict=True):
            x.copy_(new)


def functional_graph(
    traced: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode
) -> fx.GraphModule:
    """`traced` without mutation: a write to an input becomes a final `copy_` into it."""
    replay = _Replay(traced, mode)
    create_node = PythonKeyTracer.create_node

    def noted(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(tracer, *args, **kwargs)
        if replay.node is not None and node.op == "call_function":
            for key in _CARRIED:
                if key in replay.node.meta:
                    node.meta[key] = replay.node.meta[key]
        return node

    def run(*flat: Any) -> Any:
        found = replay.run(*flat, enable_io_processing=False)
        replay.write_back()
        return found

    with mode, torch.no_grad(), replaced((NODE_CARRIED, noted)):
        plain = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        return trace(functionalize(run, remove="mutations"), plain)
