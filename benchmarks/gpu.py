"""The step of a 350 M GPT in bf16 on one GPU, against `torch.compile`, side by side in one run.

    python -m benchmarks.gpu --rounds 7 --steps 10

    recorded   the captured step as one CUDA graph (TUTTI_CUDA_GRAPH=1, `precision=bf16`)
    by ops     the same, played op by op
    compiled   PyTorch: `torch.compile` of the model, autocast to bf16, fused AdamW
    reduced    the same with `mode="reduce-overhead"`, which uses CUDA graphs too

All in one process and on the same batches; in each round every way runs `--steps` steps between two waits
for the GPU. Written as JSON: seconds of a step, tokens a second against `compiled`, and the predicted and the
measured peak of the captured step. Ends with 1 where no GPU is found.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from benchmarks import machine
from benchmarks.command_line import parser
from benchmarks.models import Case, GPTCase, optimizer, plain_step
from tutti.environment import CUDA_GRAPH
from tutti.execution.cuda_graph import NUM_WARM_UP
from tutti.planner.memory import predict


class TiedCase(GPTCase):
    """The GPT whose scores come from the embedding's own weight."""

    def make(self) -> nn.Module:
        model: Any = super().make()
        model.head.weight = model.embed.weight
        return model


MODEL = TiedCase(
    name="350 M GPT", per_rank=8, vocab=50304, window=1024, width=1024, depth=24, head_dim=64
)
NUM_BATCHES = 4
Way = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def asked(value: str) -> Iterator[None]:
    """`TUTTI_CUDA_GRAPH` set to `value`."""
    before = os.environ.get(CUDA_GRAPH.name)
    os.environ[CUDA_GRAPH.name] = value
    try:
        yield
    finally:
        os.environ.pop(CUDA_GRAPH.name)
        if before is not None:
            os.environ[CUDA_GRAPH.name] = before


def captured(case: Case, device: str) -> tutti.Step:
    """The step, captured in bf16."""
    model = case.model().to(device)
    return tutti.distribute(plain_step(case), model, optimizer(model), "precision=bf16")


def compiled(case: Case, device: str, **options: Any) -> Way:
    """The step with a compiled model."""
    model = case.model().to(device)
    opt = optimizer(model)
    faster: Any = torch.compile(model, **options)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = case.loss(faster, inputs, targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    return step


def ways(case: Case, device: str) -> dict[str, Way]:
    """Each way to take a step, warmed up in its own environment."""
    batches = given(case, device)
    made: dict[str, Way] = {}
    for name, value in (("recorded", "1"), ("by ops", "0")):
        step = captured(case, device)
        with asked(value):
            step(*batches[0])  # what is asked for counts when the code is written
        made[name] = step
    made["compiled"] = compiled(case, device)
    made["reduced"] = compiled(case, device, mode="reduce-overhead")
    for name in ("compiled", "reduced"):
        made[name](*batches[0])
    for step in made.values():
        for k in range(NUM_WARM_UP + 2):
            step(*batches[k % NUM_BATCHES])
    return made


def given(case: Case, device: str) -> list[tuple[Tensor, Tensor]]:
    """The batches, on the device."""
    batches = [case.batch(k, 1) for k in range(NUM_BATCHES)]
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]


def seconds(
    timed: Mapping[str, Callable[..., object]],
    batches: Sequence[tuple[Tensor, ...]],
    rounds: int,
    steps: int,
) -> dict[str, list[float]]:
    """Seconds of a step, one value a round, the ways in turn."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, step in timed.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for k in range(steps):
                step(*batches[k % len(batches)])
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - begin) / steps)
    return found


def peaks(step: Any, batch: tuple[Tensor, ...]) -> tuple[int, int]:
    """Predicted and measured bytes that come and go with a call."""
    step.measure(*batch)
    last = step._last
    return predict(last.program, last.execution.graph).call_nbytes, last.measured


def result(case: Case, rounds: int, steps: int) -> dict[str, Any]:
    """Everything measured, in one run."""
    timed, batches = ways(case, "cuda"), given(case, "cuda")
    losses = {name: [float(step(*b)) for b in batches] for name, step in timed.items()}
    found = seconds(timed, batches, rounds, steps)
    medians = {name: statistics.median(values) for name, values in found.items()}
    predicted, measured = peaks(timed["by ops"], batches[0])
    return {
        "date": date.today().isoformat(),
        "machine": machine.describe() | {"gpu": torch.cuda.get_device_name()},
        "model": case.name,
        "seconds": found,
        "tokens per second": {name: case.units(1) / s for name, s in medians.items()},
        "against compiled": {name: medians["compiled"] / s for name, s in medians.items()},
        "losses": losses,
        "peak nbytes": {"predicted": predicted, "measured": measured},
    }


def main() -> int:
    """Run, print, and keep the result."""
    out = Path(__file__).parent / "results"
    options = parser(__doc__, rounds=7, steps=10, out=out).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device was found", file=sys.stderr)
        return 1
    found = result(MODEL, options.rounds, options.steps)
    text = json.dumps(found, indent=2)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{found['date']}-gpu.json").write_text(text + "\n")
    for name, ratio in found["against compiled"].items():
        print(f"{name:<10}{found['tokens per second'][name]:>12.0f} tokens/s{ratio:>8.3f}")
    last = {name: values[-1] for name, values in found["losses"].items()}
    print("loss: " + ", ".join(f"{name} {value:.3f}" for name, value in last.items()))
    predicted, measured = found["peak nbytes"].values()
    print(
        f"peak of a call: predicted {predicted}, measured {measured} ({measured / predicted:.3f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
