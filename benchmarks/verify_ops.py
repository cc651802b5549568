"""Every op of PyTorch's own tests as a step, compared with eager PyTorch in float64.

    python -m benchmarks.verify_ops                              # about 700 ops, 4 samples each: two minutes
    python -m benchmarks.verify_ops --cases linalg index --layouts "" "data=2"
    python -m benchmarks.verify_ops --ways in_place integers     # the in-place forms; operands of int64

A step computes the op of its batch, times a weight, and takes the gradient of a weighted sum of the results.
On one device the command compares its value and the updated weight, under a layout `tutti.verify` does. It
prints each op that tutti refuses, with the reason. It leaves out samples that eager PyTorch does not train,
and values that no program defines (`empty`).
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import tutti
from benchmarks.command_line import chosen, parser
from tutti.capture.second_trace.random_ops import OurRandomness, rewinding
from tutti.errors import TuttiError

# name -> the dtype of the operands, and whether the op writes its first one.
WAYS = {
    "plain": (torch.float64, False),
    "in_place": (torch.float64, True),
    "integers": (torch.int64, False),
}
UNDEFINED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)
MOST_SAMPLES = 40  # to choose from: some ops have thousands
Step = Callable[..., Tensor]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))


def weighted_sum(results: Any) -> Tensor:
    """One number of all results, each element with a weight of its own; not finite ones count as 0."""
    total = torch.zeros((), dtype=torch.float64)
    for x in tree_leaves(results):
        if not isinstance(x, Tensor):
            continue
        if x.layout != torch.strided:
            raise NotImplementedError("sparse results")
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        weights = torch.linspace(0.5, 1.5, max(x.numel(), 1), dtype=torch.float64)[: x.numel()]
        total = total + (torch.nan_to_num(x.double(), 0, 0, 0) * weights.reshape(x.shape)).sum()
    return total


def program(op: Callable[..., Any], given: Any) -> tuple[Step, list[Tensor]]:
    """A step of `op`, and its batch: the tensors of the sample."""
    leaves, form = tree_flatten(given)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def step(model: Any, optimizer: Any, *tensors: Tensor) -> Tensor:
        values = list(leaves)
        for i, x in zip(at, tensors, strict=True):
            inexact = x.is_floating_point() or x.is_complex()
            values[i] = x * model.w.to(x.dtype) if inexact else x.clone()
        args, kwargs = tree_unflatten(values, form)
        loss = weighted_sum(op(*args, **kwargs))
        # Ops that a factor leaves unchanged have no gradient but this one.
        loss = loss + model.w * (1 + 0.5 * loss.detach().abs())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [leaves[i].detach() for i in at]


def trained() -> tuple[Weighted, torch.optim.Optimizer]:
    model = Weighted()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def samples(op: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    """`(args, kwargs)` of some of an op's samples, from the first to the last."""
    if dtype not in op.dtypes:
        return
    found = list(itertools.islice(op.sample_inputs("cpu", dtype), MOST_SAMPLES))
    last = len(found) - 1
    for k in sorted({i * last // max(count - 1, 1) for i in range(count)}):
        if found:
            yield (found[k].input, *found[k].args), found[k].kwargs


def outcome(op: Callable[..., Any], given: Any, layout: str) -> str:
    """ "same", "left out" where eager does not train, or what differs."""
    step, batch = program(op, given)
    model, optimizer = trained()
    try:
        with OurRandomness(0, 0) as ours, rewinding(ours):
            expected = step(model, optimizer, *(x.clone() for x in batch))
    except Exception:  # not differentiable, or no such op on a CPU
        return "left out"
    if any(not len(x) for x in batch if x.ndim) or not (expected + model.w).isfinite():
        return "left out"
    copy = [x.clone() for x in batch]
    other, its_optimizer = trained()
    try:
        if layout:
            verdict = tutti.verify(step, other, its_optimizer, tuple(copy), layout)
            return "same" if verdict.ok else f"WRONG {verdict}".replace("\n", " ")
        play = tutti.distribute(step, other, its_optimizer, "")
        found = play(*copy)
    except TuttiError as error:
        return f"refused: {error.what}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {str(error).splitlines()[0]}"
    pairs = ((found, expected), (other.w.detach(), model.w.detach()))
    right = all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)
    return "same" if right else f"WRONG {float(found)} for {float(expected)}"


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__, cases=[], ways=["plain"], layouts=[""], count=4)
    given = made.parse_args(words)
    ways = zip(given.ways, chosen(made, "ways", given.ways, WAYS), strict=True)
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        made.error(f"PyTorch's list of ops needs {error.name}: pip install {error.name}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    totals: Counter[str] = Counter()
    every: Any = op_db
    for entry, (way, (dtype, writes)) in itertools.product(every, [*ways]):
        known = not given.cases or any(part in entry.name for part in given.cases)
        if not known or entry.name in UNDEFINED or (writes and entry.inplace_variant is None):
            continue
        op = written(entry.inplace_variant) if writes else entry
        numbered = enumerate(samples(entry, dtype, given.count))
        for (k, sample), layout in itertools.product(numbered, list[str](given.layouts)):
            found = outcome(op, sample, layout)
            told = found not in ("same", "left out")
            totals[found.partition(" ")[0].rstrip(":") if told else found] += 1
            if told:
                name = f"{entry.name} {entry.variant_test_name}".strip()
                print(f"{name} {k} {way} {layout or 'one device'}: {found[:160]}", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in sorted(totals.items())))
    return int(bool(totals["WRONG"] or totals["FAILED"]))


def written(op: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place op on a copy: a step may not write its batch."""
    return lambda x, *args, **kwargs: op(x.clone(), *args, **kwargs)


if __name__ == "__main__":
    sys.exit(main())
