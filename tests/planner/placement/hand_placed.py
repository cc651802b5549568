"""Models of Hugging Face in small sizes, each with the placement of Megatron-LM written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, WIDTH, TOKENS, ROWS = 256, 64, 16, 8
COLUMN, ROW, BIAS = "tensor, -", "-, tensor", "tensor"


def train_step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    """Forward, loss, backward, clipping, update."""
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def texts() -> dict[str, Tensor]:
    """Tokens and their labels."""
    tokens = torch.randint(
        3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    return {"input_ids": tokens, "labels": tokens.roll(1)}


def short_texts() -> dict[str, Tensor]:
    """Half of the tokens: the graph of a scan has a part for each."""
    return {name: x[:, : TOKENS // 2] for name, x in texts().items()}


def images() -> dict[str, Tensor]:
    """Images of 4 by 4 patches and their classes."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 3, 16, 16, generator=source)
    return {"pixel_values": x, "labels": torch.randint(8, (ROWS,), generator=source)}


@dataclass(frozen=True)
class HandPlaced:
    """A class of `transformers` with its sizes, and the shardings of its weights.

    batch: makes the arguments of a call.
    """

    model: str
    config: str
    sizes: Mapping[str, Any]
    place: Mapping[str, str]
    batch: Callable[[], dict[str, Tensor]] = texts

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model with random weights, the same at every call, and its optimizer."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes)
        model = getattr(transformers, self.model)(config).train()
        # Above the noise of gradients that are zero but for rounding (biases of keys).
        return model, torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)

    def arguments(self) -> tuple[Any, ...]:
        """Those of `tutti.verify` before the layout."""
        return train_step, *self.build(), (self.batch(),)


def linears(columns: str, rows: str, *, bias: bool = False) -> dict[str, str]:
    """Linear layers by name: those split by output, with their biases, and those split by input."""
    place = {f"*.{name}.weight": COLUMN for name in columns.split()}
    place |= {f"*.{name}.bias": BIAS for name in columns.split() if bias}
    return place | {f"*.{name}.weight": ROW for name in rows.split()}


_LM = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 8, "intermediate_size": 4 * WIDTH}

MODELS: dict[str, HandPlaced] = {
    "llama": HandPlaced(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_LM, **_HEADS, "num_key_value_heads": 4},
        linears("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj")
        | {"model.embed_tokens.weight": COLUMN, "lm_head.weight": COLUMN},
    ),
    "gpt2": HandPlaced(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 1, "n_head": 8, "n_positions": TOKENS,
         "bos_token_id": 0, "eos_token_id": 0},
        {"*.c_attn.weight": ROW, "*.c_attn.bias": BIAS, "*.attn.c_proj.weight": COLUMN,
         "*.c_fc.weight": ROW, "*.c_fc.bias": BIAS, "*.mlp.c_proj.weight": COLUMN,
         "transformer.wte.weight": COLUMN},
    ),
    "bert": HandPlaced(
        "BertForMaskedLM",
        "BertConfig",
        {**_LM, **_HEADS, "max_position_embeddings": TOKENS},
        linears("query key value intermediate.dense", "output.dense", bias=True)
        | {"bert.embeddings.word_embeddings.weight": COLUMN, "cls.predictions.bias": BIAS},
    ),
    "vit": HandPlaced(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": WIDTH, "num_hidden_layers": 1, **_HEADS, "image_size": 16, "patch_size": 4,
         "num_labels": 8},
        linears("q_proj k_proj v_proj fc1", "o_proj fc2", bias=True),
        images,
    ),
    "t5": HandPlaced(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 4 * WIDTH, "num_layers": 1,
         "num_decoder_layers": 1, "num_heads": 8, "decoder_start_token_id": 0},
        linears("q k v wi", "o wo")
        | {"*.relative_attention_bias.weight": ROW, "shared.weight": COLUMN},
    ),
    "mamba": HandPlaced(
        "MambaForCausalLM",
        "MambaConfig",
        {**_LM, "state_size": 8},
        {"*.in_proj.weight": COLUMN, "*.conv1d.weight": "tensor, -, -", "*.conv1d.bias": BIAS,
         "*.x_proj.weight": ROW, "*.dt_proj.weight": COLUMN, "*.dt_proj.bias": BIAS,
         "*.A_log": COLUMN, "*.D": BIAS, "*.out_proj.weight": ROW,
         "backbone.embeddings.weight": COLUMN},
        short_texts,
    ),
}  # fmt: skip
