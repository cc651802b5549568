"""Notes of a trace on every node: its region, its source line, its module, its random stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tutti.capture.backwards import Engine, around_backward
from tutti.capture.patch_table import NODE_NOTED
from tutti.capture.second_trace.constant_writes import refuse_real_write
from tutti.capture.second_trace.random_ops import is_random, rewinding
from tutti.graph.edits.patch import hook_here, replaced
from tutti.torch_private.autograd_engine import (
    next_node_number,
    running_node_number,
)
from tutti.torch_private.op_tables import OpOverload, schema_of
from tutti.torch_private.pytrees import tree_leaves
from tutti.torch_private.tracing import PythonKeyTracer, get_proxy_mode, get_proxy_slot
from tutti.user_lines import user_line


@dataclass
class Watch:
    """The state of one trace while it runs."""

    names: dict[int, str]
    modules: list[str] = field(default_factory=list)
    region: str = "forward"
    in_update: int = 0
    num_streams: int = 0
    num_nodes: int = 0
    forward: dict[int, tuple[str, str]] = field(default_factory=dict)

    def note(self, node: fx.Node, root: Any) -> None:
        """Write the current notes onto a fresh node; `root` has the constants of the trace."""
        self.num_nodes += 1
        source = user_line()
        module = self.modules[-1] if self.modules else ""
        number = running_node_number() if self.region == "backward" else None
        if number is not None:
            line, owner = self.forward.get(number, (source, module))
            node.meta["forward_source"], module = line, owner or module
        elif self.region == "forward" and _gives_tensors(node):
            # The first op after autograd has numbered a node is that node's: later ones may have no gradient.
            self.forward.setdefault(next_node_number() - 1, (source, module))
        node.meta["source"], node.meta["module"] = source, module
        node.meta["region"] = "update" if self.in_update else self.region
        refuse_real_write(node, root)
        if is_random(node.target, node.args, node.kwargs):
            node.meta["stream"] = self.num_streams
            self.num_streams += 1


def _gives_tensors(node: fx.Node) -> bool:
    """Whether a node is an op that autograd may have numbered; a query of a size may come much later."""
    is_op = isinstance(node.target, OpOverload)
    return is_op and not schema_of(node.target).name.startswith("aten::sym_")


def _name_outputs(module: str, out: Any) -> None:
    """Note the module on the nodes of its output tensors, so that a pattern can find them."""
    mode = get_proxy_mode()
    if mode is None:
        return
    for x in tree_leaves(out):
        slot = get_proxy_slot(x, mode.tracer, None) if isinstance(x, Tensor) else None
        if slot is not None:
            slot.proxy.node.meta.setdefault("output_of", []).append(module)


@contextlib.contextmanager
def watching(model: nn.Module, ignore: frozenset[int] = frozenset()) -> Iterator[Watch]:
    """Yield a `Watch` that notes everything traced inside."""
    watch = Watch({id(m): n for n, m in model.named_modules(remove_duplicate=False)})
    create_node = PythonKeyTracer.create_node

    def noted(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(tracer, *args, **kwargs)
        if node.op == "call_function":
            watch.note(node, tracer.root)
        return node

    def enter(module: nn.Module, _args: Any) -> None:
        watch.modules.append(watch.names.get(id(module), type(module).__name__))

    def leave(_module: nn.Module, _args: Any, out: Any) -> None:
        _name_outputs(watch.modules.pop(), out)

    hooks = [
        register_module_forward_pre_hook(hook_here(enter)),
        register_module_forward_hook(hook_here(leave), always_call=True),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced((NODE_NOTED, noted)))
        stack.enter_context(_regions(watch))
        stack.enter_context(rewinding(watch))
        stack.callback(lambda: [h.remove() for h in hooks])
        yield watch


@contextlib.contextmanager
def _regions(watch: Watch) -> Iterator[None]:
    """`backward` while autograd runs and after, `update` while an optimizer steps."""

    def noted(run: Engine) -> Engine:
        def backward(*args: Any, **kwargs: Any) -> Any:
            before, watch.region = watch.region, "backward"
            try:
                return run(*args, **kwargs)
            finally:
                watch.region = before

        return backward

    def entering(_opt: Optimizer, _args: Any, _kwargs: Any) -> None:
        watch.in_update += 1

    def leaving(_opt: Optimizer, _args: Any, _kwargs: Any) -> None:
        watch.in_update -= 1

    pre = register_optimizer_step_pre_hook(hook_here(entering))
    post = register_optimizer_step_post_hook(hook_here(leaving))
    try:
        with around_backward(noted):
            yield
    finally:
        pre.remove()
        post.remove()
