"""The models, optimizers and steps that the suite verifies, all tiny and all on the CPU.

Every case is an ordinary single-device program: nothing in it knows about tutti. Sizes are chosen
so that `data=8` and `tensor=4` divide them; every loss ignores some targets (`-100`), unevenly over
the rows, so that a mean of per-rank means is not the mean; and every clip really clips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from zoo_models import GPT, LSTMLM, MLP, Translator, UNet
from zoo_steps import (
    NUM_CLASSES,
    SEQ,
    VOCAB,
    Batch,
    accumulate_step,
    autocast_step,
    decoder_batch,
    eval_step,
    image_batch,
    labels_step,
    masked_step,
    padded_batch,
    plain_step,
    token_batch,
    translation_batch,
    two_losses_step,
    vector_batch,
)

NUM_BATCHES = 2
Built = tuple[Callable[..., Tensor], nn.Module, Optimizer | None, list[Batch]]


@dataclass(frozen=True)
class Case:
    """One program: `build()` returns `(train_step, model, optimizer, batches)`, always the same.

    place: parameter-name pattern -> sharding text, one entry per dim, for an axis named `tensor`.
    seq_ok: dim 1 of every batch tensor is the sequence, and an axis may split it.
    micro_ok: the rows of the batch are independent, so it may be cut into micro-batches.
    random: the step draws random numbers (dropout).
    scheduler: makes a learning-rate scheduler, stepped by the user after every training step.
    """

    name: str
    build: Callable[[], Built]
    place: Mapping[str, str] = field(default_factory=dict)
    seq_ok: bool = False
    micro_ok: bool = True
    random: bool = False
    scheduler: Callable[[Optimizer], LRScheduler] | None = None


# --- building ----------------------------------------------------------------------------------

Make = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    """AdamW; eps is above the noise of gradients that are zero but for rounding (key biases)."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1, **options)


def sgd(model: nn.Module) -> Optimizer:
    """SGD with every option that has state or a second use of the gradient."""
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2
    )


def build(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch] = token_batch,
    step: Callable[..., Tensor] = plain_step,
    optimizer: Make | None = adamw,
) -> Built:
    """Seed, then model, optimizer and batches: equal at every call."""
    torch.manual_seed(0)
    model = make_model().train(optimizer is not None)
    batches = [make_batch(which) for which in range(NUM_BATCHES)]
    return step, model, optimizer(model) if optimizer else None, batches


def hf(model: str, config: str, **sizes: Any) -> nn.Module:
    """An unmodified Hugging Face model of random weights: class name, config name, sizes."""
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


# gpt and llama have two layers: what layers do to each other; others one, as all of their layers are alike.
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
GQA = SMALL | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "intermediate_size": 64,
    "max_position_embeddings": SEQ,
}
LLAMA = partial(hf, "LlamaForCausalLM", "LlamaConfig", **GQA | {"num_hidden_layers": 2})
QWEN3 = partial(hf, "Qwen3ForCausalLM", "Qwen3Config", **GQA)
GPT2 = partial(
    hf, "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4,
    n_positions=SEQ, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
BERT = partial(
    hf, "BertForMaskedLM", "BertConfig", **SMALL, intermediate_size=64, max_position_embeddings=SEQ
)
VIT = partial(
    hf, "ViTForImageClassification", "ViTConfig", hidden_size=32, num_hidden_layers=1,
    num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
    num_labels=NUM_CLASSES,
)  # fmt: skip
T5 = partial(
    hf, "T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64,
    num_layers=2, num_decoder_layers=1, num_heads=4, decoder_start_token_id=0,
)  # fmt: skip
MAMBA = partial(
    hf, "MambaForCausalLM", "MambaConfig", vocab_size=VOCAB, hidden_size=32, state_size=4,
    num_hidden_layers=1,
)  # fmt: skip
RESNET = partial(
    hf, "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16],
    depths=[1, 1], layer_type="basic", num_labels=NUM_CLASSES,
)  # fmt: skip


# --- placements: column-parallel in, row-parallel out -------------------------------------------

COLUMN, ROW, BIAS = "tensor, -", "-, tensor", "tensor"


def linears(columns: str, rows: str, *, bias: bool = True) -> dict[str, str]:
    """Weights `[out, in]` of linear layers: columns split by output (biases too), rows by input."""
    place = {f"*.{name}.weight": COLUMN for name in columns.split()}
    if bias:
        place |= {f"*.{name}.bias": BIAS for name in columns.split()}
    return place | {f"*.{name}.weight": ROW for name in rows.split()}


PLACE_GPT = linears("q k v up", "o down")
PLACE_MUON = {"up.weight": COLUMN, "down.weight": ROW}
PLACE_MLP = PLACE_MUON | {"up.bias": BIAS}
PLACE_LLAMA = linears("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj", bias=False)
PLACE_LLAMA_HEAD = PLACE_LLAMA | {"lm_head.weight": COLUMN}
PLACE_GPT2 = {  # Conv1D keeps its weight as [in, out]; c_attn fuses q, k and v in one dim
    "*.mlp.c_fc.weight": ROW,
    "*.mlp.c_fc.bias": BIAS,
    "*.mlp.c_proj.weight": COLUMN,
}
PLACE_BERT = linears("query key value intermediate.dense", "output.dense")
PLACE_VIT = linears("q_proj k_proj v_proj fc1", "o_proj fc2")
PLACE_T5 = linears("q k v wi", "o wo", bias=False)
PLACE_TRANSFORMER = linears("linear1", "linear2")  # in_proj_weight fuses q, k and v in one dim

# --- the cases ---------------------------------------------------------------------------------


def _models() -> list[Case]:
    """One case per architecture."""
    dropout_gpt = partial(GPT, num_layers=1, dropout=0.1, tied=True)
    llama_eager = partial(LLAMA, num_hidden_layers=1, attn_implementation="eager")
    muon_mlp = partial(MLP, bias=False)
    lm: dict[str, Any] = {"seq_ok": True}
    random: dict[str, Any] = {"random": True}
    return [
        Case("gpt", lambda: build(GPT), PLACE_GPT, **lm),
        Case("gpt_tied", lambda: build(dropout_gpt), PLACE_GPT, **lm, **random),
        Case("llama", lambda: build(LLAMA, step=labels_step), PLACE_LLAMA_HEAD, **lm),
        Case("llama_eager", lambda: build(llama_eager, step=labels_step), PLACE_LLAMA_HEAD, **lm),
        Case("qwen3", lambda: build(QWEN3, step=labels_step), PLACE_LLAMA, **lm),
        Case("gpt2", lambda: build(GPT2, step=labels_step), PLACE_GPT2, **lm, **random),
        Case("bert", lambda: build(BERT, padded_batch, masked_step), PLACE_BERT, **lm, **random),
        Case("t5", lambda: build(T5, translation_batch, masked_step), PLACE_T5, **lm, **random),
        Case("vit", lambda: build(VIT, image_batch, labels_step), PLACE_VIT),
        Case("transformer", lambda: build(Translator, decoder_batch), PLACE_TRANSFORMER,
             **lm, **random),
        Case("mamba", lambda: build(MAMBA, partial(token_batch, seq=SEQ // 2), labels_step)),
        Case("lstm", lambda: build(LSTMLM, partial(token_batch, seq=SEQ // 4))),
        Case("resnet", lambda: build(RESNET, image_batch, labels_step, sgd), micro_ok=False),
        Case("unet", lambda: build(UNet, image_batch)),
        Case("mlp_muon", lambda: build(muon_mlp, vector_batch, optimizer=muon), PLACE_MUON),
    ]  # fmt: skip


def muon(model: nn.Module) -> Optimizer:
    """Muon, which takes 2-D parameters only."""
    return torch.optim.Muon(model.parameters(), lr=0.02)


def rmsprop(model: nn.Module) -> Optimizer:
    """Centered RMSprop with momentum: all three of its slots."""
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-5, momentum=0.9, centered=True)


def adafactor(model: nn.Module) -> Optimizer:
    """Adafactor: row and column statistics, and a clip by root mean square."""
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


_MAKERS: dict[str, Make] = {
    "sgd": sgd,
    "adamw_foreach": partial(adamw, foreach=True),
    "adamw_loop": partial(adamw, foreach=False),
    "adamw_fused": partial(adamw, fused=True),
    "rmsprop": rmsprop,
    "adafactor": adafactor,
}


def _optimizers() -> list[Case]:
    """One case per optimizer, all on the same MLP."""
    return [
        Case(name, partial(build, MLP, vector_batch, optimizer=make), PLACE_MLP)
        for name, make in _MAKERS.items()
    ]


def _steps() -> list[Case]:
    """One case per unusual training step, on a GPT of one layer; of two if they are recomputed."""
    short = partial(GPT, num_layers=1)
    remat = partial(GPT, dropout=0.1, remat=True)
    halve = partial(StepLR, step_size=1, gamma=0.5)
    shared: dict[str, Any] = {"place": PLACE_GPT, "seq_ok": True}
    return [
        Case("autocast", lambda: build(short, step=autocast_step), **shared),
        Case("checkpoint", lambda: build(remat), **shared, random=True),
        Case("two_losses", lambda: build(short, step=two_losses_step), **shared),
        Case("accumulate", lambda: build(short, step=accumulate_step), **shared),
        Case("scheduler", lambda: build(short), **shared, scheduler=halve),
        Case("eval", lambda: build(short, step=eval_step, optimizer=None), **shared),
    ]


def _by_name(*groups: list[Case]) -> dict[str, Case]:
    return {case.name: case for group in groups for case in group}


CASES: dict[str, Case] = _by_name(_models(), _optimizers(), _steps())
TRANSFORMERS: tuple[str, ...] = (
    *("gpt", "gpt_tied", "llama", "llama_eager", "qwen3"),
    *("gpt2", "bert", "t5", "vit", "transformer"),
)
OPTIMIZERS: tuple[str, ...] = tuple(_by_name(_optimizers()))
STEPS: tuple[str, ...] = tuple(_by_name(_steps()))


def play(case: Case, num_steps: int = NUM_BATCHES) -> list[Tensor]:
    """The eager reference: the losses of `num_steps` steps on one device."""
    step, model, optimizer, batches = case.build()
    states = (model,) if optimizer is None else (model, optimizer)
    scheduler = case.scheduler(optimizer) if case.scheduler and optimizer else None
    losses = []
    for which in range(num_steps):
        losses.append(step(*states, *batches[which % len(batches)]).detach())
        if scheduler:
            scheduler.step()
    return losses
