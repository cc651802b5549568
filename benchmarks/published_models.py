"""Models of Hugging Face on the meta device, and their training step, for `published_rates`.

    float32 weights -> cast to bfloat16 -> the model in bfloat16 -> gradients, clipping, AdamW in float32

which is what FSDP's mixed precision and Megatron's distributed optimizer compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# Megatron's shardings: columns of the first matmul, rows of the second; the vocabulary of both ends.
LLAMA_PLACE = {
    "*.[qkv]_proj.weight": "tensor, -",
    "*.o_proj.weight": "-, tensor",
    "*.gate_proj.weight": "tensor, -",
    "*.up_proj.weight": "tensor, -",
    "*.down_proj.weight": "-, tensor",
    "lm_head.weight": "tensor, -",
    "*embed_tokens.weight": "tensor, -",
}
OPT_PLACE = {
    "*.[qkv]_proj.weight": "tensor, -",
    "*.[qkv]_proj.bias": "tensor",
    "*.out_proj.weight": "-, tensor",
    "*.fc1.weight": "tensor, -",
    "*.fc1.bias": "tensor",
    "*.fc2.weight": "-, tensor",
    "*embed_tokens.weight": "tensor, -",
}
PLACES = {"llama": LLAMA_PLACE, "gpt": OPT_PLACE}
FUSED = "fused_causal"
# By mode, which of the matmuls of a Llama's layer stay: q, k, v, o, gate, up, down are 1 to 7.
_KEPT: dict[str, Callable[[int], bool]] = {
    "matmuls": lambda n: n % 2 == 1,
    "matmuls, sums": lambda n: n % 2 == 1 or n == 4,
}


def make_model(
    family: str,
    *,
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
    sequence: int,
    attention: str,
    recompute: str = "none",
    hidden: int = 0,
    kv_heads: int = 0,
) -> nn.Module:
    """A model without memory for its weights.

    Args:
        family: `llama`, or `gpt`: OPT with GELU, which has the layers of GPT-3.
        width, layers, heads, vocabulary, sequence: sizes.
        attention: `fused` (causal, no mask in memory) or `eager` (scores, softmax and dropout, op by op).
        recompute: `none`; `layers`: `torch.utils.checkpoint` around each; `matmuls`: the same, but it keeps
            attention and every second matmul, as torchtitan's selective mode does; `matmuls, sums`: it keeps
            what a split matmul adds over `tensor`, too, as that mode does with tensor parallelism.
        hidden: of the perceptron; by default 4 `width`.
        kv_heads: heads of keys and values; by default `heads`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    shared: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": sequence,
        "use_cache": False,
        "attn_implementation": _registered(attention),
    }
    with torch.device("meta"):
        if family == "llama":
            more: dict[str, Any] = {
                "intermediate_size": hidden,
                "num_key_value_heads": kv_heads or heads,
            }
            made = LlamaForCausalLM(LlamaConfig(**shared, **more, tie_word_embeddings=False))
        else:
            more = {"ffn_dim": hidden or 4 * width, "word_embed_proj_dim": width}
            more |= {"activation_function": "gelu", "dropout": 0.1, "attention_dropout": 0.1}
            made = OPTForCausalLM(OPTConfig(**shared, **more, tie_word_embeddings=True))
    if recompute != "none":
        kwargs: dict[str, Any] = {"use_reentrant": False}
        if recompute in _KEPT:
            kwargs["context_fn"] = partial(_matmul_contexts, _KEPT[recompute])
        made.activation_checkpointing_enable(kwargs)
    return made.train()


def _matmul_contexts(kept: Callable[[int], bool]) -> Any:
    """The contexts of a layer's forward and of its recomputation: attention and some matmuls stay.

    Args:
        kept: whether the result of a layer's n-th matmul (from 1) stays.
    """
    count = 0

    def policy(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        nonlocal count
        if op is torch.ops.aten.mm.default:
            count += 1
            stays = kept(count)
        else:
            stays = "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if stays else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Forward and backward in bfloat16, loss and update in float32."""
    optimizer.zero_grad()
    cast = {f"model.{name}": p.to(torch.bfloat16) for name, p in model.named_parameters()}
    loss = torch.func.functional_call(_Backward(model), cast, (tokens, targets))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


class _Backward(nn.Module):
    """Loss and backward of `model` as one call, so that a recomputed layer sees the cast weights, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        return loss.detach()


def _registered(attention: str) -> str:
    """The name by which Hugging Face knows an attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if attention == "eager":
        return "eager"
    AttentionInterface.register(FUSED, _fused_attention)
    AttentionMaskInterface.register(FUSED, lambda *_, **__: None)
    return FUSED


def _fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """`query` (batch, heads, tokens, head dim); the result is (batch, tokens, heads, head dim)."""
    grouped = key.shape[1] != query.shape[1]
    made = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return made.transpose(1, 2).contiguous(), None
