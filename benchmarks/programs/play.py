"""Plays a script: as PyTorch does, or distributed; notes what it returns and keeps; compares."""

from __future__ import annotations

import dataclasses
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

import tutti
from benchmarks.programs.script import SAME, Script, whole
from tutti.capture.second_trace.random_ops import OurRandomness, rewinding
from tutti.errors import CommError, TuttiError

# Values by name: "call 2 returned.loss", "weights.0.bias", "optimizer.0.exp_avg", ...
Trace = dict[str, np.ndarray[Any, Any]]
NUDGE = 4e-16  # of each weight: what rounding may do
# How far beyond the reference's own answer to a nudge a value may lie.
TIMES_NUDGED = 100.0


@dataclass(frozen=True)
class Cell:
    """How one way to run a program ended: `kind` is same, refused, WRONG, RAW, n/a."""

    kind: str
    about: str = ""

    @property
    def bad(self) -> bool:
        """Wrong in silence, or a raw traceback."""
        return self.kind in ("WRONG", "RAW")

    def __str__(self) -> str:
        word = f"**{self.kind}**" if self.bad else self.kind
        return (
            f"{word} {self.about}".strip() if self.kind != "refused" else f"refused: {self.about}"
        )


def failed(error: BaseException) -> Cell:
    """A `TuttiError` is a refusal, unless a rank was left waiting; anything else is raw."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, TuttiError) and not isinstance(error, CommError):
        return Cell("refused", f"{type(error).__name__}: {lines[0]}")
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return Cell("RAW", f"{type(error).__name__}: {lines[0][:160]}{at}")


# --- what there is to compare ---------------------------------------------------------------------


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers in what a script returns or keeps, each by its path."""
    if isinstance(value, (Tensor, bool, int, float)):
        yield name, value
    elif isinstance(value, Mapping):
        for key, x in value.items():
            yield from leaves(x, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield from leaves(x, f"{name}.{i}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from leaves(getattr(value, one.name), f"{name}.{one.name}")


def array(value: Any) -> np.ndarray[Any, Any]:
    """All of a value, where ranks keep shards as well."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return np.asarray(value)
    if isinstance(value, FakeTensor):
        raise RuntimeError("a fake tensor of the capture is left in what the script keeps")
    value = value.detach()
    value = value.to_dense() if value.is_sparse else value
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy().copy()


def modules(model: Any) -> dict[str, nn.Module]:
    """The modules of a model that is one, or a dict or list of them."""
    if isinstance(model, nn.Module):
        return {"weights": model}
    pairs = model.items() if isinstance(model, Mapping) else enumerate(model)
    return {f"weights.{key}": one for key, one in pairs}


def optimizers(optimizer: Any) -> dict[str, Any]:
    """The optimizers by name."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        return {f"optimizer.{key}": one for key, one in optimizer.items()}
    if isinstance(optimizer, (list, tuple)):
        return {f"optimizer.{key}": one for key, one in enumerate(optimizer)}
    return {"optimizer": optimizer}


def state(script: Script) -> Trace:
    """Weights, buffers, slots, what the groups hold in numbers, and what the script watches."""
    with ExitStack() as blocks:
        for module in modules(script.model).values():
            blocks.enter_context(whole(module, slots=True))
        return {name: array(x) for name, x in _state_here(script)}


def _state_here(script: Script) -> Iterator[tuple[str, Any]]:
    for name, module in modules(script.model).items():
        yield from leaves(module.state_dict(), name)
    for name, one in optimizers(script.optimizer).items():
        holders = [p for group in one.param_groups for p in group["params"]]
        for i, p in enumerate(holders):
            yield from leaves(dict(one.state.get(p, {})), f"{name}.{i}")
        for g, group in enumerate(one.param_groups):
            rest = {k: v for k, v in group.items() if k not in ("params", "fused", "foreach")}
            yield from leaves(rest, f"{name}.group{g}")
    yield from leaves(script.watch(), "watched")


# --- playing --------------------------------------------------------------------------------------


def play(script: Script, call: Callable[..., Any]) -> Trace:
    """The whole loop of a script, each step taken by `call`."""
    found: Trace = {}
    for i, batch in enumerate(script.batches):
        given = ((), batch) if isinstance(batch, dict) else (batch, {})
        returned = call(i, *given[0], **given[1])
        found |= {n: array(x) for n, x in leaves(returned, f"call {i} returned")}
        after = script.between(i)
        found |= {n: array(x) for n, x in leaves(after, f"after call {i}")}
    return found | state(script)


def eager(script: Script) -> Trace:
    """As PyTorch runs it; random ops within the step draw the numbers that tutti draws."""
    given = [script.model] if script.optimizer is None else [script.model, script.optimizer]

    def call(i: int, *args: Any, **named: Any) -> Any:
        with OurRandomness(0, i) as ours, rewinding(ours):
            return script.train_step(*given, *args, **named)

    return play(script, call)


def nudged(script: Script) -> Trace:
    """As `eager`, from weights that differ in their last bits: how much of the result is rounding."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in {
            id(p): p for m in modules(script.model).values() for p in m.parameters()
        }.values():
            size = NUDGE if p.dtype == torch.float64 else 1e-7
            p.mul_(1 + size * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    return eager(script)


def distributed(
    script: Script, layout: str, place: Mapping[str, str] | None = None, **options: Any
) -> Trace:
    """With the one line that a user adds."""
    step = tutti.distribute(
        script.train_step, script.model, script.optimizer, layout, place=place, **options
    )
    return play(script, lambda i, *args, **named: step(*args, **named))


def verified(script: Script, layout: str, place: Mapping[str, str] | None) -> Cell:
    """What `verify` says of the first batch."""
    batch = script.batches[0]
    if isinstance(batch, dict):
        return Cell("n/a")
    found = tutti.verify(
        script.train_step, script.model, script.optimizer, batch, layout, place=place
    )
    if found.ok:
        return Cell("same", f"{found.max_error:.0e}")
    worst = max((found.max_error, found.worst), (found.capture_error, found.worst_capture))
    return Cell("WRONG", f"verify {worst[0]:.0e} {worst[1]}")


def guarded(run: Callable[[], Any]) -> Any:
    """What `run` returns, or a cell of how it failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:
            return failed(error)


# --- comparing ------------------------------------------------------------------------------------


def distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The largest difference; infinite where shapes differ, or one alone is not a number."""
    if a.shape != b.shape:
        return math.inf
    if not a.size:
        return 0.0
    if a.dtype == bool or b.dtype == bool:
        return float((a != b).any())
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(np.complex128) - b.astype(np.complex128))
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    apart = np.where(equal, 0.0, apart)
    return math.inf if np.isnan(apart).any() else float(apart.max())


def compared(
    found: Any, wanted: Trace, nudge: Trace | None = None, *, within: float = SAME
) -> Cell:
    """A trace against the eager one, each value on its own scale and on that of its own rounding."""
    if isinstance(found, Cell):
        return found
    if missing := [n for n in wanted if n not in found]:
        return Cell("WRONG", f"{missing[0]} is missing")
    worst, worst_name, excess = 0.0, "", 0.0
    for name, b in wanted.items():
        apart = distance(found[name], b)
        scale = _scale(name, wanted)
        noise = distance(nudge[name], b) if nudge and name in nudge else 0.0
        bound = within * scale + TIMES_NUDGED * noise
        if apart > bound and (apart / scale >= excess):
            excess, worst_name = apart / scale, name
        elif apart / scale > worst and apart > TIMES_NUDGED * noise:
            worst = apart / scale
    if worst_name:
        return Cell("WRONG", f"{excess:.0e} in {worst_name}")
    return Cell("same", f"{worst:.0e}")


def _scale(name: str, wanted: Trace) -> float:
    """That of the value, or a little of the largest of its kind where it is far smaller itself."""
    kind = name.split(".")[0]
    own = _largest(wanted[name])
    others = max(_largest(x) for n, x in wanted.items() if n.split(".")[0] == kind)
    return max(own, 1e-3 * others if kind.startswith("weights") else own, 1e-12)


def _largest(x: np.ndarray[Any, Any]) -> float:
    if not x.size:
        return 0.0
    largest = float(np.abs(x.astype(np.complex128)).max())
    return largest if math.isfinite(largest) else 1.0
