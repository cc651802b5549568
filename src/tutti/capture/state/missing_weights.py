"""The refusal of tensors that only an optimizer holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import CaptureError
from tutti.user_lines import program_line, quoted


def not_of_the_model(
    optimizer: Optimizer, param: Tensor, every: Sequence[Optimizer]
) -> CaptureError:
    """The error for a parameter that only one of `every` optimizer holds."""
    kind, shape = type(optimizer).__name__, list(param.shape)
    several = f"optimizer {[*map(id, every)].index(id(optimizer))}, " if len(every) > 1 else ""
    own = '{"net": model, "own": nn.ParameterList([weight])} as the model'
    if isinstance(param, nn.Parameter):
        return CaptureError(
            f"{several}{kind} holds a parameter of shape {shape} that the model does not have",
            at=quoted(program_line()),
            why="an optimizer must be made from this model's own parameters, and they must stay its own",
            fix=f"{kind}(model.parameters(), ...) on the model given here; for a weight of its own (a "
            f"temperature, master weights) {own}",
        )
    return CaptureError(
        f"{several}{kind} updates a tensor of shape {shape} that is no nn.Parameter",
        at=quoted(program_line()),
        why="state that an optimizer updates must be a parameter of the model",
        fix=f"weight = nn.Parameter(torch.zeros({_listed(shape)})) in place of the tensor, before "
        f"{kind}([weight], ...); then {own}",
    )


def _listed(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape)) or "()"
