"""The models of `chosen_layouts`: a step takes 30 to 200 ms on a core; and the examples with a `place`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import (
    BETAS,
    WEIGHT_DECAY,
    WEIGHTS_SEED,
    Case,
    GPTCase,
    LlamaCase,
    ResNetCase,
    optimizer,
    plain_step,
)
from benchmarks.predicted_steps import BertCase, MixtureCase

EXAMPLES = Path(__file__).parents[1] / "examples"
_EXAMPLE_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class VitCase(Case):
    """A vision transformer as Hugging Face has it: patches of 4 pixels, a class of each image."""

    image: int = 64
    width: int = 192
    depth: int = 3
    classes: int = 100

    @property
    def units_per_sample(self) -> int:
        return 1

    def make(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            image_size=self.image,
            patch_size=4,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.depth,
            num_attention_heads=self.width // 32,
            num_labels=self.classes,  # pyright: ignore[reportCallIssue]
        )
        return ViTForImageClassification(config)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(pixel_values=inputs).logits

    def draw(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(num_samples, 3, self.image, self.image, generator=generator)
        return images, torch.randint(self.classes, (num_samples,), generator=generator)


# `per_rank` is the whole batch here: all layouts of a case share it. Few samples, since each power of two of
# them is a number of micro-batches, and adds as many layouts.
MODELS: dict[str, Case] = {
    case.name: case
    for case in (
        GPTCase(name="gpt", vocab=1024, window=256, width=256, depth=2, per_rank=4),
        LlamaCase(
            name="llama", vocab=4096, window=256, width=256, depth=2, hidden=704, kv_heads=2,
            per_rank=4,
        ),
        ResNetCase(
            name="resnet", image=64, classes=100, stem=48, widths=(48, 96, 192, 384),
            depths=(1, 1, 1, 1), per_rank=16,
        ),
        BertCase(name="bert", per_rank=4, depth=2, window=256),
        VitCase(name="vit", per_rank=4),
        MixtureCase(name="moe", per_rank=4, window=256),
    )
}  # fmt: skip
TINY: dict[str, Case] = {
    "tiny": GPTCase(name="tiny", vocab=64, window=16, width=32, depth=1, head_dim=16, per_rank=2)
}


@dataclass(frozen=True)
class Trained:
    """A step with all that `distribute` takes, and a batch."""

    step: Callable[..., Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, ...]
    place: Mapping[str, str]


def trained(name: str) -> Trained:
    """A new model of `MODELS` or `TINY`, the same in every process; without a `place`."""
    case = {**MODELS, **TINY}[name]
    model = case.model()
    return Trained(plain_step(case), model, optimizer(model), case.batch(0, 1), {})


def example(name: str) -> Trained:
    """The step of `examples/<name>.py` on its own model in its own size, with its own `place`."""
    module = _example_module(name)
    torch.manual_seed(WEIGHTS_SEED)
    model: nn.Module = (
        module.GPT(128, 4, 4, 0.1) if name == "gpt" else module.make_model(4)  # its defaults
    )
    made = torch.optim.AdamW(model.parameters(), 1e-3, betas=BETAS, weight_decay=WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(1)
    shape = (_EXAMPLE_ROWS, module.WINDOW)
    tokens = torch.randint(module.VOCABULARY, shape, generator=generator)
    batch = (tokens, tokens.roll(-1, 1)) if name == "gpt" else (tokens,)
    return Trained(module.train_step, model.train(), made, batch, module.PLACE)


def placed_examples() -> list[str]:
    """The examples with a `place` of their own."""
    return [p.stem for p in sorted(EXAMPLES.glob("*.py")) if "\nPLACE" in p.read_text()]


def _example_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
