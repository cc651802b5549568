"""Models of Hugging Face in small scripts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, SINGLE, Register, Script, whole
from benchmarks.programs.scripts.blocks import tokens

program = Register("hugging_face")
VOCAB, LENGTH, ROWS = 32, 8, 4


def _hugging_face(name: str, config: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


@program(
    "GPT-2, generating in between", "Hugging Face's model; dict batches; generate", within=SINGLE
)
def gpt2() -> Script:
    model = _hugging_face(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2,
        n_positions=16, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        outputs = model(**batch)
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        return {"loss": outputs.loss.detach(), "logits": outputs.logits.detach()}

    @torch.no_grad()
    def between(call: int) -> Any:
        model.eval()
        with whole(model):
            prompt = torch.ones(1, 2, dtype=torch.long)
            said = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.train()
        return said

    batches = []
    for i in range(CALLS):
        x, _ = tokens(i)
        batches.append(
            ({"input_ids": x, "labels": x.clone(), "attention_mask": torch.ones_like(x)},)
        )
    return Script(train_step, model, optimizer, batches, between)


@program(
    "BERT MLM",
    "Hugging Face's model; masked inside the step by random numbers; step(**batch)",
    within=SINGLE,
)
def bert() -> Script:
    model = _hugging_face(
        "BertForMaskedLM", "BertConfig", vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)

    def train_step(model: Any, optimizer: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        chosen = (torch.rand(input_ids.shape) < 0.5) & attention_mask.bool()
        labels = torch.where(chosen, input_ids, -100)
        inputs = torch.where(chosen, torch.full_like(input_ids, 3), input_ids)
        loss = model(input_ids=inputs, attention_mask=attention_mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = []
    for i in range(CALLS):
        x, _ = tokens(i)
        batches.append({"input_ids": x, "attention_mask": torch.ones_like(x)})
    return Script(train_step, model, optimizer, batches)


@program(
    "T5 with Adafactor",
    "Hugging Face's model, optimizer and schedule; uneven labels",
    within=SINGLE,
)
def t5() -> Script:
    import transformers

    model = _hugging_face(
        "T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=16,
        num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0.1,
    )  # fmt: skip
    optimizer = transformers.Adafactor(
        model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False, warmup_init=False
    )
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 1, CALLS + 2)

    def train_step(model: Any, optimizer: Any, ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    batches = []
    for i in range(CALLS):
        x, y = tokens(i)
        y[:, -1 - i :] = -100
        batches.append((x, y))
    return Script(train_step, model, optimizer, batches, lambda call: scheduler.step())


@program("Whisper", "Hugging Face's speech model; features in, tokens out", within=SINGLE)
def whisper() -> Script:
    model = _hugging_face(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCAB, d_model=8,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=4, max_source_positions=8,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = model(input_features=batch["features"], labels=batch["labels"]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = [
        ({"features": torch.randn(ROWS, 4, 16), "labels": tokens(i)[0]},) for i in range(CALLS)
    ]
    return Script(train_step, model, optimizer, batches)
