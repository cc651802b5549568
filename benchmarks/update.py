"""The update of a whole model, as a captured step runs it, against PyTorch's fused AdamW, side by side.

    python -m benchmarks.update

One thread; gradients are given, so that the optimizer's step is all there is to do. The ways alternate,
and their medians are compared. `loop` is the step captured as single element-by-element ops (what an
optimizer without a fused kernel gets), `each` one fused call a parameter, `joined` what a run does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.command_line import parser
from tutti.capture.state.lift import hypers_of
from tutti.capture.step import capture
from tutti.execution.generate import generate
from tutti.layout import Layout, Mesh
from tutti.partition.partition import partition
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.propagate.plan import plan

# name: (vocabulary, positions, width, layers): both have 29.5 million parameters.
MODELS = {"few large tensors": (16384, 128, 512, 4), "many small tensors": (8192, 128, 320, 20)}
NUM_ROUNDS = 41
Given = Sequence[Tensor]


class Plain(AdamW):
    """A step of its own is captured as it is."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def parameters(vocab: int, positions: int, width: int, layers: int) -> nn.ParameterList:
    """The weights of a GPT."""
    shapes: list[tuple[int, ...]] = [(vocab, width), (positions, width), (vocab, width)]
    for _ in range(layers):
        for rows, cols in ((3, 1), (1, 1), (4, 1), (1, 4)):
            shapes += [(rows * width, cols * width), (rows * width,)]
        shapes += [(width,)] * 4
    return nn.ParameterList([nn.Parameter(torch.randn(s) * 0.02) for s in shapes])


def train_step(model: nn.ParameterList, optimizer: Optimizer, *grads: Tensor) -> None:
    """An optimizer's step with given gradients."""
    for p, g in zip(model, grads, strict=True):
        p.grad = g
    optimizer.step()


def captured_update(
    model: nn.ParameterList,
    grads: Given,
    kind: Callable[..., Optimizer],
    without: Collection[str] = (),
) -> tuple[Callable[[], None], int, float]:
    """A function that does one step of generated code, and how many nodes and seconds it took to make."""
    optimizer = kind(model.parameters())
    begin = time.perf_counter()
    captured = capture(train_step, model, optimizer, grads)
    program = partition(plan(captured, Layout()))
    graph = optimized(program, Target(frozenset(captured.updated)), without=without)
    code = generate(graph, captured.owner, None, Mesh(), {}).function
    seconds = time.perf_counter() - begin
    state: dict[str, Any] = {s.name: s.tensor.detach() for s in captured.state}
    feed: dict[str, Any] = {h.name: h.value for h in hypers_of(optimizer)}
    feed |= {f"batch.{k}": g for k, g in enumerate(grads)}

    def run() -> None:
        _, new = code([state[n] if n in state else feed[n] for n in captured.inputs], lambda _: 0)
        state.update(zip(captured.updated, new, strict=True))

    return run, len(graph.nodes), seconds


def eager_update(model: nn.ParameterList, grads: Given) -> Callable[[], None]:
    """PyTorch's own fused step."""
    optimizer = AdamW(model.parameters(), fused=True)
    for p, g in zip(model, grads, strict=True):
        p.grad = g
    return optimizer.step  # type: ignore[return-value]


def medians(ways: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in turn after two rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds + 2):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def main() -> None:
    """Print a line per model and way."""
    parser(__doc__).parse_args()
    torch.set_num_threads(1)
    for title, sizes in MODELS.items():
        models = [parameters(*sizes) for _ in range(4)]
        grads = [torch.randn_like(p) * 1e-3 for p in models[0]]
        num = sum(p.numel() for p in models[0])
        print(f"{title}: {len(grads)} tensors, {num / 1e6:.1f} M parameters")
        made = {
            "loop": captured_update(models[1], grads, Plain),
            "each": captured_update(models[2], grads, AdamW, ("fused_update", "foreach")),
            "joined": captured_update(models[3], grads, AdamW),
        }
        ways = {"eager": eager_update(models[0], grads)} | {n: m[0] for n, m in made.items()}
        found = medians(ways, NUM_ROUNDS)
        for name, seconds in found.items():
            how = f"{made[name][1]:6} nodes  {made[name][2]:5.2f} s to make" if name in made else ""
            print(f"  {name:<8}{seconds * 1e3:9.2f} ms {seconds / found['eager']:7.3f}  {how}")


if __name__ == "__main__":
    main()
