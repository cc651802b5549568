"""Predicted against measured: time and memory of a step on this machine, under every kind of layout.

    tutti calibrate
    python -m benchmarks.predicted_steps [--models gpt-3.7M ...] [--layouts "data=2" ...]

Each model runs under each layout on one or two ranks, right after its prediction. Errors are those of the
median step, and of the peak that the allocator reports. Nothing of the prediction was tuned on the models
marked with a star.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from benchmarks.command_line import parser
from benchmarks.models import CASES, Case, GPTCase, LlamaCase, optimizer, plain_step
from tutti.job import Job
from tutti.launch.launch import launch
from tutti.layout import Layout
from tutti.planner.estimates.layout_estimate import estimate
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.hardware_files import cluster_here
from tutti.planning.this_machine import machine_here

LAYOUTS = (
    *(
        "",
        "micro=4",
        "remat=full",
        "data=2",
        "data=2 zero=1",
        "data=2 zero=2 micro=2",
        "data=2 zero=3",
    ),
    *("data=2 micro=4", "data=2 remat=full", "tensor=2"),
    *(f"pipe=2 micro=4 schedule={name}" for name in ("gpipe", "1f1b", "zb")),
)
_SAMPLES = 8
# Not looked at while the prediction was written.
HELD_OUT = ("bert", "moe", "gpt-51M")
_SECONDS, _MOST_STEPS, _LEAST_STEPS = 2.0, 40, 7


@dataclass(frozen=True, kw_only=True)
class BertCase(Case):
    """BERT as Hugging Face has it, for a class of each token."""

    depth: int = 4
    window: int = 128

    def make(self) -> nn.Module:
        """A new model."""
        from transformers import BertConfig, BertForTokenClassification

        config = BertConfig(
            vocab_size=2048,
            hidden_size=256,
            num_hidden_layers=self.depth,
            num_attention_heads=4,
            intermediate_size=1024,
            num_labels=16,  # pyright: ignore[reportCallIssue]
        )
        return BertForTokenClassification(config)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """(samples, tokens, 16)."""
        return model(input_ids=inputs).logits

    def draw(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens, and a class for each."""
        tokens = torch.randint(2048, (num_samples, self.window), generator=generator)
        return tokens, tokens % 16

    @property
    def units_per_sample(self) -> int:
        """Tokens."""
        return self.window


class Experts(nn.Module):
    """Every expert sees every token, weighed by the gates: a mixture without a choice."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num, bias=False)
        self.up = nn.Parameter(torch.randn(num, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width)."""
        weights = self.gate(x).softmax(-1)
        hidden = F.silu(torch.einsum("bsd,edh->ebsh", x, self.up))
        made = torch.einsum("ebsh,ehd->ebsd", hidden, self.down)
        return x + torch.einsum("ebsd,bse->bsd", made, weights)


@dataclass(frozen=True, kw_only=True)
class MixtureCase(BertCase):
    """An embedding, mixtures of experts, logits."""

    def make(self) -> nn.Module:
        """A new model."""
        layers = [Experts(192, 4) for _ in range(3)]
        return nn.Sequential(nn.Embedding(2048, 192), *layers, nn.Linear(192, 16))

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """(samples, tokens, 16)."""
        return model(inputs)


MODELS: dict[str, Case] = {
    **{
        name: CASES[name]
        for name in ("gpt-3.7M", "gpt-29.5M", "gpt-51M", "llama-30M", "resnet-11M")
    },
    "bert": BertCase(name="bert", per_rank=8),
    "moe": MixtureCase(name="moe", per_rank=8),
}


@dataclass(frozen=True)
class Found:
    """One case: seconds and bytes, predicted and measured; 0 where a layout is refused."""

    model: str
    layout: str
    predicted_seconds: float = 0.0
    seconds: float = 0.0
    predicted_nbytes: int = 0
    nbytes: int = 0

    @property
    def time_error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_nbytes / self.nbytes - 1 if self.nbytes else 0.0


def place_of(case: Case) -> dict[str, str]:
    """Megatron's placement by hand."""
    found = {f"{name}.weight": "tensor, -" for name in case.columns}
    found |= {f"{name}.weight": "-, tensor" for name in case.rows}
    return found


def layouts_of(case: Case, layouts: Sequence[str]) -> list[str]:
    """Those that the model allows: BatchNorm couples the samples, and not every model has a placement."""
    found = list(layouts)
    if not case.columns:
        found = [x for x in found if "tensor" not in x]
    if not isinstance(case, GPTCase | LlamaCase | BertCase):
        found = [x for x in found if "micro" not in x]
    return found


def _batch(case: Case) -> tuple[Tensor, Tensor]:
    return case.draw(_SAMPLES, torch.Generator().manual_seed(0))


def predicted(case: Case, layout: str) -> tuple[float, int]:
    """Seconds of a step, and bytes that it allocates above those held before."""
    model = case.model()
    parsed = Layout.parse(layout)
    job = Job.of(plain_step(case), model, optimizer(model), parsed, place=place_of(case))
    program = CandidatePrograms(job, _batch(case)).program(parsed)
    machine = machine_here(cluster_here(), parsed.num_ranks)
    made = estimate(program, machine)
    if machine.pace is not None:
        made = made.slower(machine.pace())
    assert made.memory is not None
    return made.seconds, made.memory.call_nbytes


def measured(case: Case, layouts: Sequence[str]) -> dict[str, tuple[float, int]]:
    """On real ranks, all of one number: seconds of the median step, and bytes at its peak."""
    num_ranks = Layout.parse(layouts[0]).num_ranks
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        code = launch(num_ranks, __file__, [case.name, str(path), *layouts], "")
        if code:
            sys.exit(f"the ranks ended with {code}")
        return json.loads(path.read_text())


def on_rank(case: Case, layouts: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Time every layout on this rank."""
    found: dict[str, tuple[float, int]] = {}
    for layout in layouts:
        model = case.model()
        step = tutti.distribute(
            plain_step(case), model, optimizer(model), layout, place=place_of(case)
        )
        batch = _batch(case)
        for _ in range(3):
            step(*batch)
        times = [_seconds(step, batch) for _ in range(3)]
        num = min(_MOST_STEPS, max(_LEAST_STEPS, int(_SECONDS / max(times))))
        if torch.distributed.is_initialized():
            counts = [torch.zeros(1) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(counts, torch.tensor([float(num)]))
            num = int(min(c.item() for c in counts))
        times = [_seconds(step, batch) for _ in range(num)]
        step.measure(*batch)
        last: Any = step._last
        found[layout] = statistics.median(times), _most(last.measured or 0)
    return found


def _most(nbytes: int) -> int:
    """Of all ranks: the prediction is for the one with the most."""
    if not torch.distributed.is_initialized():
        return nbytes
    found = torch.tensor(nbytes)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return int(found.item())


def _seconds(step: Any, batch: tuple[Tensor, Tensor]) -> float:
    begin = time.perf_counter()
    step(*batch)
    return time.perf_counter() - begin


def compare(name: str, layouts: Sequence[str]) -> list[Found]:
    """Every layout of a model."""
    case, found = MODELS[name], list[Found]()
    wanted = layouts_of(case, layouts)
    for num_ranks in (1, 2):
        own = [x for x in wanted if Layout.parse(x).num_ranks == num_ranks]
        if not own:
            continue
        guesses = {layout: predicted(case, layout) for layout in own}
        for layout, (seconds, nbytes) in measured(case, own).items():
            found.append(
                Found(name, layout, guesses[layout][0], seconds, guesses[layout][1], nbytes)
            )
    return found


def _summary(found: Sequence[Found]) -> str:
    def errors(values: list[float]) -> str:
        sizes = [abs(x) for x in values]
        return f"{statistics.mean(sizes):.1%} mean, {max(sizes):.1%} worst"

    time_errors = errors([f.time_error for f in found])
    memory_errors = errors([f.memory_error for f in found])
    return f"{len(found)} cases: time {time_errors}; memory {memory_errors}"


def main() -> None:
    """Print a line for each case, and the errors of all."""
    if len(sys.argv) > 2 and sys.argv[1] in MODELS and sys.argv[2].endswith(".json"):
        made = on_rank(MODELS[sys.argv[1]], sys.argv[3:])
        if tutti_rank() == 0:
            Path(sys.argv[2]).write_text(json.dumps(made))
        return
    options = parser(__doc__, models=list(MODELS), layouts=list(LAYOUTS), out=None).parse_args()
    found: list[Found] = []
    for name in options.models:
        for one in compare(name, options.layouts):
            found.append(one)
            star = "*" if name in HELD_OUT else " "
            print(
                f"{name:<11}{star}{one.layout:<32}{1e3 * one.predicted_seconds:>9.2f}"
                f"{1e3 * one.seconds:>9.2f} ms {one.time_error:>+7.1%}{one.predicted_nbytes / 1e6:>9.1f}"
                f"{one.nbytes / 1e6:>9.1f} MB {one.memory_error:>+7.1%}",
                flush=True,
            )
    print(_summary(found))
    held = [f for f in found if f.model in HELD_OUT]
    if held:
        print(f"of models not used for tuning: {_summary(held)}")
    if options.out:
        Path(options.out).write_text(json.dumps([asdict(f) for f in found], indent=1))


def tutti_rank() -> int:
    """This rank."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


if __name__ == "__main__":
    main()
