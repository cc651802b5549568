"""The models of the benchmark and their data, the same for every contender.

A `Case` says once what all contenders share: initial weights, batches, the loss, the optimizer's numbers,
and which weights tensor parallelism splits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHTS_SEED, DATA_SEED = 0, 1
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One model with its data; `per_rank` samples are the work of one rank.

    `in_micro`: micro-batches in which pipelines take a batch of `per_rank` samples; 0 where none do.
    """

    name: str
    per_rank: int
    in_micro: int = 0

    unit: ClassVar[str] = "tokens"
    # Modules that FSDP wraps one by one, as its documentation says: the repeated ones.
    blocks: ClassVar[tuple[str, ...]]
    # Linear layers whose outputs (columns) or inputs (rows) tensor parallelism splits; and the two ends.
    # Where there are none, tensor parallelism does not apply.
    columns: ClassVar[tuple[str, ...]] = ()
    rows: ClassVar[tuple[str, ...]] = ()
    embedding: ClassVar[str] = ""
    head: ClassVar[str] = ""

    @abstractmethod
    def make(self) -> nn.Module:
        """A new model with random weights."""

    @abstractmethod
    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Scores `[..., classes]` of one batch."""

    @abstractmethod
    def draw(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""

    @property
    @abstractmethod
    def units_per_sample(self) -> int:
        """How many tokens or images a sample is."""

    def model(self) -> nn.Module:
        """The model in training, with weights that are the same in every process."""
        torch.manual_seed(WEIGHTS_SEED)
        return self.make().train()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(self.logits(model, inputs).flatten(0, -2), targets.flatten())

    def batch(self, index: int, num_shares: int) -> tuple[Tensor, Tensor]:
        """Global batch number `index`, of `num_shares * per_rank` samples, the same in every process."""
        generator = torch.Generator().manual_seed(DATA_SEED + index)
        return self.draw(num_shares * self.per_rank, generator)

    def units(self, num_shares: int) -> int:
        """Tokens or images of one global batch."""
        return num_shares * self.per_rank * self.units_per_sample


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every torch contender: fused AdamW."""
    return torch.optim.AdamW(
        model.parameters(), LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )


class Block(nn.Module):
    """Pre-norm transformer block; x is [batch, seq, width]. A part of the heads may be a rank's own."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        """Causal self-attention."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only transformer: tokens [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, vocab: int, window: int, width: int, depth: int, head_dim: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, width), nn.Embedding(window, width)
        self.blocks = nn.ModuleList(Block(width, head_dim) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True, kw_only=True)
class _Language(Case):
    vocab: int
    window: int
    width: int
    depth: int
    head_dim: int = 64

    @property
    def units_per_sample(self) -> int:
        return self.window

    def draw(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        window = torch.randint(self.vocab, (num_samples, self.window + 1), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class GPTCase(_Language):
    """The GPT above."""

    blocks = ("blocks.*",)
    columns = ("blocks.*.q", "blocks.*.k", "blocks.*.v", "blocks.*.up")
    rows = ("blocks.*.o", "blocks.*.down")
    embedding, head = "embed", "head"

    def make(self) -> nn.Module:
        return GPT(self.vocab, self.window, self.width, self.depth, self.head_dim)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs)


@dataclass(frozen=True, kw_only=True)
class LlamaCase(_Language):
    """Llama as Hugging Face has it, unmodified."""

    hidden: int
    kv_heads: int

    blocks = ("model.layers.*",)
    columns = tuple(
        f"model.layers.*.{name}_proj"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    )
    rows = ("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj")
    embedding, head = "model.embed_tokens", "lm_head"

    def make(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocab,
            max_position_embeddings=self.window,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.depth,
            num_attention_heads=self.width // self.head_dim,
            num_key_value_heads=self.kv_heads,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(input_ids=inputs).logits


@dataclass(frozen=True, kw_only=True)
class ResNetCase(Case):
    """ResNet as Hugging Face has it, of basic layers, unmodified.

    Its BatchNorm takes the statistics of a rank's own samples under DDP and FSDP, and those of the whole
    batch under tutti and JAX, as on one device: these two do more.
    """

    image: int
    classes: int
    stem: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]

    unit = "images"
    blocks = ("resnet.encoder.stages.*.layers.*",)

    @property
    def units_per_sample(self) -> int:
        return 1

    def make(self) -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(
            embedding_size=self.stem,
            hidden_sizes=list(self.widths),
            depths=list(self.depths),
            layer_type="basic",
            num_labels=self.classes,  # pyright: ignore[reportCallIssue]
        )
        return ResNetForImageClassification(config)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(pixel_values=inputs).logits

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(model, inputs), targets)

    def draw(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(num_samples, 3, self.image, self.image, generator=generator)
        return images, torch.randint(self.classes, (num_samples,), generator=generator)


def _gpt(
    name: str, vocab: int, window: int, width: int, per_rank: int, in_micro: int = 0
) -> GPTCase:
    return GPTCase(
        name=name,
        vocab=vocab,
        window=window,
        width=width,
        depth=4,
        per_rank=per_rank,
        in_micro=in_micro,
    )


def plain_step(case: Case) -> Callable[..., Tensor]:
    """The step of a case as everybody writes it."""

    def train_step(
        model: nn.Module, opt: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        loss = case.loss(model, inputs, targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    return train_step


def module_names(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """The modules whose dotted names match a pattern; `*` is one part of a name."""

    def matches(name: str, pattern: str) -> bool:
        given, wanted = name.split("."), pattern.split(".")
        return len(given) == len(wanted) and all(
            w in ("*", g) for g, w in zip(given, wanted, strict=True)
        )

    names = [name for name, _ in model.named_modules()]
    return [n for n in names if any(matches(n, pattern) for pattern in patterns)]


def num_parameters(model: nn.Module) -> int:
    """How many numbers are trained; a tied one counts once."""
    return sum(p.numel() for p in model.parameters())


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _gpt("gpt-3.7M", 1024, 256, 256, 8),
        _gpt("gpt-29.5M", 16384, 128, 512, 1),
        _gpt("gpt-3.7M pipe", 1024, 256, 256, 8, 8),
        _gpt("gpt-29.5M pipe", 16384, 128, 512, 8, 8),
        _gpt("gpt-51M pipe", 256, 128, 1024, 8, 8),
        _gpt("gpt-51M", 256, 128, 1024, 1),
        LlamaCase(
            name="llama-30M", vocab=8192, window=128, width=512, depth=6, hidden=1792, kv_heads=4,
            per_rank=2,
        ),
        ResNetCase(
            name="resnet-11M", image=64, classes=100, stem=64, widths=(64, 128, 256, 512),
            depths=(2, 2, 2, 2), per_rank=16,
        ),
    )
}  # fmt: skip


def fields_of(case: Case) -> dict[str, Any]:
    """The sizes of a case, for the record."""
    return {k: v for k, v in vars(case).items() if k != "name"}
