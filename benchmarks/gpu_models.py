"""Predicted against measured on one GPU: time and memory of a step of public models in bf16.

    python -m benchmarks.gpu_models [--models gpt2 ...] [--ways eager] [--rounds 5] [--steps 5] [--out FILE]

    predicted  by the GPU's hardware file alone: nothing is calibrated
    by ops     the captured step, its ops launched one by one
    recorded   the same as one CUDA graph
    eager      PyTorch: the script's own step, autocast to bf16

Models are those of Hugging Face in their usual sizes with random weights. Figures of the hardware files are
fitted to those without a star. Ways take turns; times are medians. The file gets each op's predicted and
profiled time, too. Ends with 1 where no known GPU is found.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from benchmarks import machine
from benchmarks.command_line import chosen, parser
from benchmarks.gpu import asked, peaks, seconds
from tutti.execution.cuda_graph import NUM_WARM_UP
from tutti.hardware.cluster import Cluster
from tutti.planner.estimates.layout_estimate import traced
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.hardware_files import cluster_of

GPUS = {
    "H100 80GB HBM3": "h100",
    "H200": "h200",
    "A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-80GB": "a100-80gb",
}
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class PublicModel:
    """A model of `transformers`, and what it is trained on.

    config, options: its configuration. batch: samples, and tokens of each or pixels along a side. image: it
    sees images. momentum: trained by SGD with momentum instead of AdamW.
    """

    model: str
    config: str
    batch: tuple[int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    image: bool = False
    momentum: bool = False

    def make(self, device: str) -> nn.Module:
        """With random weights, the same at every call."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        with torch.device(device):
            return getattr(transformers, self.model)(config).train()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """As such a model is usually trained."""
        if self.momentum:
            return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        fused = next(model.parameters()).is_cuda
        return torch.optim.AdamW(model.parameters(), 1e-4, fused=fused)

    def inputs(self, model: nn.Module, device: str) -> Inputs:
        """What the model sees, and what it is to say."""
        generator = torch.Generator().manual_seed(1)
        rows, length = self.batch
        config: Any = model.config
        if self.image:
            shown = torch.randn(rows, 3, length, length, generator=generator)
            said = torch.randint(config.num_labels, (rows,), generator=generator)
        else:
            shown = torch.randint(config.vocab_size, (rows, length), generator=generator)
            said = shown
        return shown.to(device), said.to(device)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> Tensor:
        """One step of training."""
        shown, said = inputs
        name = "pixel_values" if self.image else "input_ids"
        loss = model(**{name: shown}, labels=said).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()


_GPT2 = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_MEDIUM = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50304}
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
_QWEN = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
_MIXTRAL = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "use_cache": False,
}  # fmt: skip
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {
    "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "dropout_rate": 0.0,
    "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
_CLASSES = {"num_labels": 1000}
_RESNET18 = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}


def _resnet(batch: tuple[int, int], options: Mapping[str, Any]) -> PublicModel:
    names = "ResNetForImageClassification", "ResNetConfig"
    return PublicModel(*names, batch, {**_CLASSES, **options}, image=True, momentum=True)


MODELS = {
    "gpt2": PublicModel("GPT2LMHeadModel", "GPT2Config", (8, 1024), _GPT2),
    "bert": PublicModel("BertForMaskedLM", "BertConfig", (32, 512), _BERT),
    "resnet50": _resnet((64, 224), {}),
    "gpt2-dropout": PublicModel("GPT2LMHeadModel", "GPT2Config", (8, 1024), {"use_cache": False}),
    "gpt2-medium": PublicModel("GPT2LMHeadModel", "GPT2Config", (4, 1024), {**_GPT2, **_MEDIUM}),
    "llama-1B": PublicModel("LlamaForCausalLM", "LlamaConfig", (2, 2048), _LLAMA),
    "qwen2-0.5B": PublicModel("Qwen2ForCausalLM", "Qwen2Config", (2, 2048), _QWEN),
    "vit": PublicModel("ViTForImageClassification", "ViTConfig", (64, 224), _CLASSES, image=True),
    "resnet18": _resnet((128, 224), _RESNET18),
    "mixtral": PublicModel("MixtralForCausalLM", "MixtralConfig", (4, 1024), _MIXTRAL),
    "t5": PublicModel("T5ForConditionalGeneration", "T5Config", (16, 512), _T5),
}
# Figures of hardware files are fitted to these.
FITTED = ("gpt2", "bert", "resnet50", "resnet18")
# Beside the step by ops, which is always taken.
WAYS = ("recorded", "eager")


def gpu_here() -> Cluster | None:
    """This GPU by its data; None if it is none of those with a file."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    known = next((file for word, file in GPUS.items() if word in name), None)
    return cluster_of(f"1 x {known}") if known else None


Way = Callable[[], Tensor]


def captured(one: PublicModel, device: str, recorded: str) -> tuple[tutti.Step, Way]:
    """The step, captured in bf16, and a call of it; `recorded`: `1` as a CUDA graph."""
    model = one.make(device)
    inputs = one.inputs(model, device)
    step = tutti.distribute(one.step, model, one.optimizer(model), "precision=bf16")
    with asked(recorded):
        step(*inputs)
    return step, lambda: step(*inputs)


def eager(one: PublicModel, device: str) -> Way:
    """The script's own step."""
    model = one.make(device)
    opt, inputs = one.optimizer(model), one.inputs(model, device)

    def call() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return one.step(model, opt, *inputs)

    call()
    return call


def predicted(step: tutti.Step, cluster: Cluster) -> dict[str, Any]:
    """Seconds and bytes of the captured step, and the milliseconds of its ops by name."""
    made, events = traced(step.program, PricedMachine.of(cluster))
    assert made.memory is not None
    ops, counts = Counter[str](), Counter[str]()
    for event in events[0]:
        ops[event.name] += 1e3 * event.seconds  # type: ignore[assignment]
        counts[event.name] += 1
    return {
        "seconds": made.seconds,
        "nbytes": made.memory.call_nbytes,
        "ops": {name: [counts[name], ms] for name, ms in ops.most_common()},
    }


def profiled(way: Way, steps: int = 3) -> dict[str, list[float]]:
    """By op of PyTorch: calls, milliseconds on the device, and milliseconds on the host, of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            way()
        torch.cuda.synchronize()
    return {
        row.key: [
            row.count / steps,
            row.self_device_time_total / 1e3 / steps,
            row.self_cpu_time_total / 1e3 / steps,
        ]
        for row in profile.key_averages()
        if row.self_device_time_total > 0
    }


def compared(
    one: PublicModel, cluster: Cluster, names: Sequence[str], rounds: int, steps: int
) -> dict[str, Any]:
    """Everything of a model, on the GPU."""
    step, by_ops = captured(one, "cuda", "0")
    ways = {"by ops": by_ops}
    if "recorded" in names:
        ways["recorded"] = captured(one, "cuda", "1")[1]
    if "eager" in names:
        ways["eager"] = eager(one, "cuda")
    losses = {name: float(way()) for name, way in ways.items()}
    for way in ways.values():
        for _ in range(NUM_WARM_UP + 1):
            way()
    times = seconds(ways, [()], rounds, steps)
    guess, shown = predicted(step, cluster), profiled(by_ops)
    return {
        "predicted": guess,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "nbytes": peaks(step, one.inputs(step.model, "cuda"))[1],
        "losses": losses,
        "profile": shown,
    }


def line(name: str, found: Mapping[str, Any]) -> str:
    """A row of the table."""
    guess, times = found["predicted"], found["seconds"]
    error = guess["seconds"] / times["by ops"] - 1
    memory = guess["nbytes"] / found["nbytes"] - 1
    values = [guess["seconds"], times["by ops"], *(times.get(way, 0.0) for way in WAYS)]
    shown = "".join(f"{1e3 * x:>10.2f}" if x else f"{'-':>10}" for x in values)
    star = " " if name in FITTED else "*"
    losses = " ".join(f"{x:.4f}" for x in found["losses"].values())
    return (
        f"{name:<13}{star}{shown} ms {error:>+7.1%}{guess['nbytes'] / 1e6:>9.0f}"
        f"{found['nbytes'] / 1e6:>8.0f} MB {memory:>+7.1%}   loss {losses}"
    )


def summary(errors: Sequence[float]) -> str:
    """Of the errors of some models."""
    sizes = [abs(x) for x in errors]
    return f"time {statistics.mean(sizes):.1%} mean, {max(sizes):.1%} worst of {len(sizes)} models"


def main() -> int:
    """Print a row for each model."""
    made = parser(__doc__, models=list(MODELS), ways=WAYS, rounds=5, steps=5, out=None)
    options = made.parse_args()
    wanted = dict(zip(options.models, chosen(made, "models", options.models, MODELS), strict=True))
    cluster = gpu_here()
    if cluster is None:
        print(f"no GPU of {', '.join(GPUS)} was found", file=sys.stderr)
        return 1
    print(f"{'':<14}{'predicted':>10}{'by ops':>10}{'recorded':>10}{'eager':>10}")
    results: dict[str, Any] = {
        "machine": machine.describe() | {"gpu": torch.cuda.get_device_name()},
        "models": {},
    }
    for name, one in wanted.items():
        found = compared(one, cluster, options.ways, options.rounds, options.steps)
        results["models"][name] = found
        print(line(name, found), flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()
    errors = {
        name: m["predicted"]["seconds"] / m["seconds"]["by ops"] - 1
        for name, m in results["models"].items()
    }
    print(summary(list(errors.values())))
    if held := [x for name, x in errors.items() if name not in FITTED]:
        print(f"not used for any figure: {summary(held)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
