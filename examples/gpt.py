"""Train a small GPT on Python's own manual: plain PyTorch for one device, plus one line.

    python examples/gpt.py                                           # one device
    tutti run -n 2 --layout "data=2 zero=3" examples/gpt.py          # the same numbers on two ranks
    tutti run -n 4 --layout "data=2 tensor=2" examples/gpt.py
    torchrun --nproc-per-node 2 examples/gpt.py
    tutti verify --layout "data=2 zero=3" examples/gpt.py            # show that they are the same

Ctrl-C saves a checkpoint; `--resume` goes on from it, on any number of ranks and in any layout.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor, nn

import tutti

RANK = int(os.environ.get("RANK", "0"))
WINDOW, VOCABULARY = 128, 256  # tokens are bytes
PROMPTS = ("The ", "If the object ", "A class is ", "    def ")

# Tensor parallelism, should the layout have a "tensor" axis: heads and hidden units are split.
PLACE = dict.fromkeys((f"*.{name}_proj.weight" for name in ("q", "k", "v", "up")), "tensor, -")
PLACE |= {"*.o_proj.weight": "-, tensor", "*.down_proj.weight": "-, tensor"}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.mlp_norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(WINDOW, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def train_step(model, optimizer, tokens, targets):
    model.train()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def eval_step(model, tokens):
    model.eval()
    return model(tokens)


def batch_at(text: Tensor, step: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The batch of a step is a function of (seed, step), so a resumed run sees the same ones."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    start = torch.randint(len(text) - WINDOW, (size, 1), generator=generator)
    window = text[start + torch.arange(WINDOW + 1)]
    return window[:, :-1], window[:, 1:]


def validation_loss(evaluate, text: Tensor, size: int, num_batches: int) -> float:
    """The mean over `num_batches` batches of windows, spread evenly over the text."""
    start = torch.linspace(0, len(text) - WINDOW - 1, num_batches * size).long()[:, None]
    windows = text[start + torch.arange(WINDOW + 1)].split(size)
    losses = [F.cross_entropy(evaluate(w[:, :-1]).mT, w[:, 1:]) for w in windows]
    return torch.stack(losses).mean().item()


def generate(evaluate, num_bytes: int, seed: int, temperature: float = 0.7) -> list[str]:
    """Continues the prompts. All ranks draw the same bytes: logits are global, the seed is one."""
    generator = torch.Generator().manual_seed(seed)
    texts = [list(prompt.encode()) for prompt in PROMPTS]
    for _ in range(num_bytes):
        window = torch.zeros(len(texts), WINDOW, dtype=torch.long)
        for row, text in zip(window, texts, strict=True):
            row[: len(text)] = torch.tensor(text[-WINDOW:])
        logits = evaluate(window)  # what stands after the text cannot matter: attention is causal
        for text, row in zip(texts, logits, strict=True):
            weights = (row[min(len(text), WINDOW) - 1] / temperature).softmax(-1)
            text.append(int(torch.multinomial(weights, 1, generator=generator)))
    return [bytes(text).decode(errors="replace") for text in texts]


class Interrupt:
    """Notes Ctrl-C, and lets the ranks agree on the step before which they all stop."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self.ask)

    def ask(self, *_: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher may pass it on a second time

    def agreed(self) -> bool:
        # The signal finds ranks at different steps; one that stopped alone would hang the others.
        flag = torch.tensor(int(self.asked))
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


def save(step, out: Path, history: dict) -> None:
    """Writes a new directory, then names it in `latest`: a run killed at any point can go on."""
    final = out / f"step_{len(history['train']):06d}"
    step.save(final, extra=history)  # there, whole, from one moment to the next
    if RANK == 0:
        (out / "latest.draft").write_text(final.name)
        (out / "latest.draft").rename(out / "latest")
        for other in set(out.glob("step_*")) - {final}:
            shutil.rmtree(other)


def draw(path: Path, history: dict, entropy: float) -> None:
    losses = torch.tensor(history["train"])
    smooth = losses.unfold(0, min(25, len(losses)), 1).mean(1)
    steps = torch.arange(1, len(losses) + 1)
    axes = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8)
    axes.plot(steps[len(losses) - len(smooth) :] - 12, smooth, color="#08519c", label="training")
    axes.plot(*zip(*history["valid"], strict=True), "o-", color="#d94801", label="validation")
    axes.axhline(entropy, color="0.4", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="A small GPT on Python's manual")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.figure.savefig(path, dpi=150)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
    sizes = {"steps": 600, "batch": 16, "width": 128, "depth": 4, "heads": 4, "dropout": 0.1}
    for name, default in {**sizes, "lr": 6e-3, "seed": 0, "every": 100}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    return parser.parse_args()


def main() -> None:
    args, console = options(), Console(quiet=RANK != 0, highlight=False, soft_wrap=True)
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    train_text, valid_text = text.tensor_split([len(text) * 9 // 10])
    share = text.bincount() / len(text)
    entropy = -torch.special.xlogy(share, share).sum().item()
    console.print(f"text: {len(text):,} bytes, unigram entropy {entropy:.3f} nats per byte")

    torch.manual_seed(args.seed)
    model = GPT(args.width, args.depth, args.heads, args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * i / args.steps))
    )
    step = tutti.distribute(train_step, model, optimizer, place=PLACE, seed=args.seed)
    evaluate = tutti.distribute(eval_step, model, place=PLACE)
    history, latest = {"train": [], "valid": []}, args.out / "latest"
    if args.resume and latest.exists():
        history = step.load(args.out / latest.read_text())
        schedule.load_state_dict(history["schedule"])
        for group, lr in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = lr
        console.print(f"goes on after step {len(history['train'])}")
    done = first = len(history["train"])
    parts = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.description}")
    progress = Progress(*parts, console=console, disable=RANK != 0)
    bar = progress.add_task("", total=args.steps, completed=done)
    interrupt, began = Interrupt(), time.perf_counter()
    with progress:
        while done < args.steps and not interrupt.agreed():
            loss = step(*batch_at(train_text, done, args.batch, args.seed)).item()
            schedule.step()
            done += 1
            history["train"].append(loss)
            history["schedule"] = schedule.state_dict()
            speed = (done - first) * args.batch * WINDOW / (time.perf_counter() - began)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            line = f"loss {loss:.3f}  {speed:,.0f} tokens/s  peak {peak:,.0f} MB per rank"
            progress.update(bar, completed=done, description=line)
            if done % args.every == 0 or done == args.steps:
                valid = validation_loss(evaluate, valid_text, args.batch, 4)
                history["valid"].append((done, valid))
                save(step, args.out, history)
                progress.print(f"step {done:5}  {line}  validation {valid:.3f}")
    if done < args.steps:
        save(step, args.out, history)
        console.print(f"stopped after step {done}; to go on: the same command with --resume")
        return
    valid = validation_loss(evaluate, valid_text, args.batch, 20)
    console.print(f"validation loss {valid:.3f} nats per byte, unigram entropy {entropy:.3f}")
    for sample in generate(evaluate, 120, args.seed):
        console.print(sample, markup=False, style="cyan")
    if RANK == 0:
        draw(curve := args.out / "loss.png", history, entropy)
        console.print(f"checkpoint in {args.out / latest.read_text()}, loss curve in {curve}")


if __name__ == "__main__":
    main()
