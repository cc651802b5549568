"""Mixtures of experts of Hugging Face, small, with random weights and their own code, and a training step.

`Routed` is one in plain PyTorch that computes in one dtype throughout, as theirs do not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, TOP, WIDTH, HIDDEN = 4, 2, 16, 24
VOCAB, SAMPLES, LENGTH = 64, 4, 8
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 32, "intermediate_size": HIDDEN,
}  # fmt: skip
_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP}),
    "Qwen3-MoE": ("Qwen3Moe", {"num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": TOP,
                               "moe_intermediate_size": HIDDEN, "head_dim": 4}),
    "DeepSeek-V3": ("DeepseekV3", {
        "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP, "moe_intermediate_size": HIDDEN,
        "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4}),
}  # fmt: skip
NAMES = tuple(_OF)
# The layers of each with experts: DeepSeek's first is dense.
NUM_LAYERS = {"Mixtral": 2, "Qwen3-MoE": 1, "DeepSeek-V3": 1}


def mixture(name: str, experts: str = "batched_mm", **sizes: Any) -> nn.Module:
    """The model, whose layers run `experts` of Hugging Face's implementations; `sizes` for other ones."""
    import transformers

    family, more = _OF[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_COMMON | more | sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    model.set_experts_implementation(experts)
    return model


class Routed(nn.Module):
    """Each token goes to its two best experts: [samples, width] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shares, experts = self.router(x).softmax(-1).topk(TOP, -1)
        flat, rows = experts.flatten(), x.repeat_interleave(TOP, 0)
        gate, up = torch.bmm(self.up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        inner = F.silu(gate) * up
        made = torch.bmm(inner.unsqueeze(1), self.down[flat]).squeeze(1)
        return x + (made * shares.flatten()[:, None]).view(-1, TOP, WIDTH).sum(1)


def routed(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Routed(), nn.Linear(WIDTH, WIDTH), Routed()).to(dtype)


def points(seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 32, WIDTH, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def points_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))


def train_step(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def arguments(name: str) -> tuple[Any, ...]:
    """A step's function, model, optimizer and batch."""
    model = mixture(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    return train_step, model, optimizer, (tokens(),)
