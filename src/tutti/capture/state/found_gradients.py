"""The gradients in `.grad` at an optimizer's step: in an eager step, and as values of a captured one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tutti.capture.state.gradients import plain_gradient
from tutti.graph.edits.edit import GRADIENT_OF
from tutti.graph.edits.patch import hook_here

# By name: "0/layer.weight" is the gradient at the step's first call of an optimizer.
Found = dict[str, Tensor]


@contextlib.contextmanager
def found_gradients(model: nn.Module, *, wanted: bool = True) -> Iterator[Found]:
    """Yield copies of the gradients that optimizers read inside; none unless `wanted`."""
    found: Found = {}
    calls = 0

    def entering(one: Optimizer, _args: object, _kwargs: object) -> None:
        nonlocal calls
        names = {id(p): n for n, p in model.named_parameters()}
        for p in (p for group in one.param_groups for p in group["params"]):
            grad = plain_gradient(p)
            if grad is not None and id(p) in names and not grad.is_sparse:
                found[f"{calls}/{names[id(p)]}"] = grad.detach().clone()
        calls += 1

    hook = register_optimizer_step_pre_hook(hook_here(entering)) if wanted else None
    try:
        yield found
    finally:
        if hook is not None:
            hook.remove()


def note_found(copies: Iterable[tuple[str, Any]]) -> None:
    """Note the optimizer's reads on the values whose copies a captured step has returned."""
    for name, copy in copies:
        value = copy.args[0]
        value.meta[GRADIENT_OF] = [*value.meta.get(GRADIENT_OF, ()), name]


def noted(graph: fx.Graph) -> dict[str, fx.Node]:
    """The values of a captured step that optimizers read as gradients, by name."""
    return {name: n for n in graph.nodes for name in n.meta.get(GRADIENT_OF, ())}
