"""Language models, trained as their repositories train them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts.blocks import GPT, tokens

program = Register("language")
VOCAB, LENGTH, ROWS = 32, 8, 4


@program("nanoGPT", "two groups by dim, lr written into them, losses estimated in between")
def nanogpt() -> Script:
    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    accumulation = 2

    def lr_at(it: int) -> float:
        return (
            1e-3 * (it + 1) / 2 if it < 2 else 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * it / 4))
        )

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = x.new_zeros((), dtype=torch.get_default_dtype())
        for k in range(accumulation):
            _, loss = model(x.chunk(accumulation)[k], y.chunk(accumulation)[k])
            loss = loss / accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss * accumulation

    held_out = tokens(7)

    @torch.no_grad()
    def between(call: int) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(call + 1)
        if call % 2:
            return None
        with whole(model):
            model.eval()
            _, loss = model(*held_out)
            model.train()
        return loss

    return Script(train_step, model, optimizer, [tokens(i) for i in range(CALLS)], between)


@program("minGPT Trainer", "a bound method of a trainer that counts its iterations; callbacks")
def mingpt() -> Script:
    class Trainer:
        def __init__(self) -> None:
            self.iter_num, self.grad_norm_clip, self.callbacks = 0, 1.0, []
            self.loss: Any = None

        def train_step(self, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
            _, loss = model(x, y)
            model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.grad_norm_clip)
            optimizer.step()
            self.iter_num += 1
            return loss

    model, trainer = GPT(dropout=0.1), Trainer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))

    def between(call: int) -> Any:
        if call == 1:
            trainer.grad_norm_clip = 0.05

    batches = [tokens(i) for i in range(CALLS)]
    return Script(trainer.train_step, model, optimizer, batches, between, lambda: trainer.iter_num)


@program("nanochat Muon + AdamW", "two optimizers; a momentum that warms up in a group; softcap")
def nanochat() -> Script:
    from benchmarks.programs.scripts.own import Muon

    model = GPT()
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "blocks" not in n]
    muon = Muon(matrices, lr=0.02)
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    optimizers = [adam, muon]
    for one in optimizers:
        for group in one.param_groups:
            group["initial_lr"] = group["lr"]

    def train_step(model: Any, optimizers: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, _ = model(x)
        logits = 15 * torch.tanh(logits / 15)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)
        loss.backward()
        for one in optimizers:
            one.step()
        model.zero_grad(set_to_none=True)
        return loss

    def between(call: int) -> Any:
        for one in optimizers:
            for group in one.param_groups:
                group["lr"] = group["initial_lr"] * (1 - call / 8)
        for group in muon.param_groups:
            group["momentum"] = 0.85 + 0.1 * min((call + 1) / 3, 1)

    return Script(train_step, model, optimizers, [tokens(i) for i in range(CALLS)], between)


@program("llama2.c", "RMSNorm, rotary buffers, SwiGLU, tied weights, a loss kept on the model")
def llama2c() -> Script:
    from benchmarks.programs.scripts.blocks import Llama

    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def train_step(model: Any, optimizer: Any, X: Tensor, Y: Tensor) -> Tensor:
        model(X, Y)
        loss = model.last_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Script(train_step, model, optimizer, [tokens(i) for i in range(CALLS)])


@program("mamba-minimal", "a selective scan over time in a Python loop; residual blocks")
def mamba_minimal() -> Script:
    class Mamba(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCAB, 8)
            self.in_proj, self.x_proj = nn.Linear(8, 32, bias=False), nn.Linear(16, 9, bias=False)
            self.conv1d = nn.Conv1d(16, 16, 3, groups=16, padding=2)
            self.dt_proj, self.out_proj = nn.Linear(1, 16), nn.Linear(16, 8, bias=False)
            self.A_log = nn.Parameter(
                torch.log(torch.arange(1.0, 5.0).to(torch.get_default_dtype()).repeat(16, 1))
            )
            self.D = nn.Parameter(torch.ones(16))

        def forward(self, ids: Tensor) -> Tensor:
            h = self.embedding(ids)
            x, res = self.in_proj(h).split([16, 16], dim=-1)
            x = F.silu(self.conv1d(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2))
            delta, B, C = self.x_proj(x).split([1, 4, 4], dim=-1)
            delta, A = F.softplus(self.dt_proj(delta)), -torch.exp(self.A_log)
            dA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
            dBu = torch.einsum("bld,bln,bld->bldn", delta, B, x)
            state, ys = x.new_zeros(x.shape[0], 16, 4), []
            for i in range(ids.shape[1]):
                state = dA[:, i] * state + dBu[:, i]
                ys.append(torch.einsum("bdn,bn->bd", state, C[:, i]))
            y = (torch.stack(ys, dim=1) + x * self.D) * F.silu(res)
            return (h + self.out_proj(y)) @ self.embedding.weight.T

    model = Mamba()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, [tokens(i) for i in range(CALLS)])


@program(
    "word_language_model",
    "an LSTM's hidden state goes in and comes out; plain SGD by hand; lr /= 4",
)
def word_language_model() -> Script:
    class RNNModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.rnn = nn.Embedding(VOCAB, 8), nn.LSTM(8, 8, 2, dropout=0.2)
            self.decoder, self.drop = nn.Linear(8, VOCAB), nn.Dropout(0.2)

        def forward(self, x: Tensor, hidden: Any) -> Any:
            out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
            decoded = self.decoder(self.drop(out)).view(-1, VOCAB)
            return F.log_softmax(decoded, dim=1), hidden

    model, criterion = RNNModel(), nn.NLLLoss()
    settings = {"lr": 1.0, "best": math.inf}

    def train_step(model: Any, data: Tensor, targets: Tensor, hidden: Any) -> Any:
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-settings["lr"])
        return loss, hidden

    hidden = (torch.zeros(2, ROWS, 8), torch.zeros(2, ROWS, 8))
    batches = [(x.T, y.T.reshape(-1), hidden) for x, y in (tokens(i) for i in range(CALLS))]

    def between(call: int) -> Any:
        if call == 1:
            settings["lr"] /= 4.0

    return Script(train_step, model, None, batches, between)


@program("char-rnn", "an LSTM language model; sampling in between", changes=0)
def char_rnn() -> Script:
    class CharRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(VOCAB, 8), nn.LSTM(8, 8, batch_first=True)
            self.fc = nn.Linear(8, VOCAB)

        def forward(self, x: Tensor, hidden: Any = None) -> Any:
            out, hidden = self.lstm(self.embed(x), hidden)
            return self.fc(out), hidden

    model = CharRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits, _ = model(x)
        loss = F.cross_entropy(logits.transpose(1, 2), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    @torch.no_grad()
    def between(call: int) -> Any:
        with whole(model):
            token, hidden, said = torch.zeros(1, 1, dtype=torch.long), None, []
            for _ in range(4):
                logits, hidden = model(token, hidden)
                token = logits[:, -1].argmax(-1, keepdim=True)
                said.append(token.item())
        return said

    return Script(train_step, model, optimizer, [tokens(i) for i in range(CALLS)], between)


@program("Translation (nn.Transformer)", "masks made in the step; the Noam schedule as a LambdaLR")
def translation() -> Script:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
            self.source, self.target = nn.Embedding(VOCAB, 8), nn.Embedding(VOCAB, 8)
            self.generator = nn.Linear(8, VOCAB)

        def forward(self, src: Tensor, tgt: Tensor, tgt_mask: Tensor, padding: Tensor) -> Tensor:
            out = self.transformer(
                self.source(src), self.target(tgt), tgt_mask=tgt_mask,
                src_key_padding_mask=padding, memory_key_padding_mask=padding,
            )  # fmt: skip
            return self.generator(out)

    model, loss_fn = Seq2Seq(), nn.CrossEntropyLoss(ignore_index=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: 0.1 * min((s + 1) ** -0.5, (s + 1) * 4**-1.5)
    )

    def train_step(model: Any, optimizer: Any, src: Tensor, tgt: Tensor) -> Tensor:
        size = tgt.shape[1] - 1
        mask = torch.triu(torch.ones(size, size, dtype=torch.bool), diagonal=1)
        logits = model(src, tgt[:, :-1], mask, src == 0)
        optimizer.zero_grad()
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        return loss

    batches = []
    for i in range(CALLS):
        src, tgt = tokens(i)
        src[:, -1 - i % 3 :] = 0
        src[:, 0] = 1
        batches.append((src, tgt))
    return Script(train_step, model, optimizer, batches, lambda call: scheduler.step())
