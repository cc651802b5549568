"""Train a small GPT on Python's own manual: plain PyTorch for one device, plus three lines.

    python examples/gpt.py                                           # one device
    tutti run -n 2 --layout "data=2 zero=3" examples/gpt.py          # the same numbers on two ranks
    tutti run -n 4 --layout "data=2 tensor=2" examples/gpt.py
    torchrun --nproc-per-node 2 examples/gpt.py
    tutti verify --layout "data=2 zero=3" examples/gpt.py            # show that they are the same

Ctrl-C saves a checkpoint; `--resume` goes on from it, in any layout.
"""

import argparse
import os
import time
from itertools import islice
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tutti

WINDOW, VOCABULARY = 128, 256  # tokens are bytes
PROMPTS = ("The ", "If the object ", "A class is ", "    def ")
PLACE = dict.fromkeys((f"*.{name}_proj.weight" for name in ("q", "k", "v", "up")), "tensor, -")
PLACE |= {"*.o_proj.weight": "-, tensor", "*.down_proj.weight": "-, tensor"}  # if the layout has it


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        for name in ("q", "k", "v", "o"):
            self.register_module(f"{name}_proj", nn.Linear(width, width, bias=False))
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, projections = self.attention_norm(x), (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.o_proj(y))
        return x + self.dropout(self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(WINDOW, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
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


def windows(text: Tensor, count: int) -> TensorDataset:
    start = torch.linspace(0, len(text) - WINDOW - 1, count).long()[:, None]  # spread evenly
    return TensorDataset(*(text[start + torch.arange(k, WINDOW + k)] for k in (0, 1)))


def mean_loss(evaluate, text: Tensor, size: int, num_batches: int) -> float:
    parts = DataLoader(windows(text, num_batches * size), size)
    return sum(F.cross_entropy(evaluate(x).mT, y).item() for x, y in parts) / num_batches


def generate(evaluate, num_bytes: int, seed: int) -> list[str]:
    """Continues the prompts. All ranks draw the same bytes: logits are global, the seed is one."""
    source, texts = torch.Generator().manual_seed(seed), [list(p.encode()) for p in PROMPTS]
    for _ in range(num_bytes):
        rows = torch.stack([F.pad(torch.tensor(x), (0, WINDOW - len(x))) for x in texts])
        for text, logits in zip(texts, evaluate(rows), strict=True):
            weights = (logits[len(text) - 1] / 0.7).softmax(-1)
            text.append(int(torch.multinomial(weights, 1, generator=source)))
    return [bytes(text).decode(errors="replace") for text in texts]


def main() -> None:
    console = Console(quiet=os.environ.get("RANK", "0") != "0", highlight=False, soft_wrap=True)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    sizes = {"steps": 600, "batch": 16, "width": 128, "depth": 4, "heads": 4, "dropout": 0.1}
    for name, default in {**sizes, "lr": 6e-3, "seed": 0, "every": 100, "out": "runs/gpt"}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    args = parser.parse_args()
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    entropy = torch.distributions.Categorical(text.bincount().float()).entropy().item()
    console.print(f"text: {len(text):,} bytes, unigram entropy {entropy:.3f} nats per byte")
    train_text, valid_text = text.tensor_split([len(text) * 9 // 10])
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.depth, args.heads, args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.1)
    step = tutti.distribute(train_step, model, optimizer, place=PLACE, seed=args.seed)
    evaluate = tutti.distribute(eval_step, model, place=PLACE)
    samples = windows(train_text, args.steps * args.batch)
    loader = tutti.loader(samples, args.batch, shuffle=True, seed=args.seed)
    run = tutti.Checkpoints(args.out, every=args.every, step=step, loader=loader, schedule=schedule)
    if args.resume and run.restore():
        console.print(f"goes on after step {step.num_steps}")
    first, began = step.num_steps, time.perf_counter()
    for batch in track(islice(loader, args.steps - first), "", args.steps, first, console=console):
        metrics = {"loss": step(*batch).item()}
        schedule.step()
        if (done := step.num_steps) % args.every == 0 or done == args.steps:
            metrics["validation"] = mean_loss(evaluate, valid_text, args.batch, 4)
            speed = (done - first) * args.batch * WINDOW / (time.perf_counter() - began)
            said = [f"{name} {value:.3f}" for name, value in metrics.items()]
            console.print(f"step {done:5}", *said, f"{speed:,.0f} tokens/s", sep="  ")
        if run.tick(**metrics):
            return console.print(f"stopped after step {done}; --resume goes on")
    console.print(*generate(evaluate, 110, args.seed), sep="\n", markup=False, style="cyan")
    valid = mean_loss(evaluate, valid_text, args.batch, 20)
    console.print(f"validation loss {valid:.3f} nats per byte, unigram entropy {entropy:.3f}")
    console.print(f"checkpoint in {run.save()}, loss curve in {args.out}/loss.png")
    if not console.quiet:
        axes = Figure().subplots(subplot_kw={"xlabel": "step", "ylabel": "loss, nats per byte"})
        axes.plot("step", "loss", data=run.history)
        axes.figure.savefig(f"{args.out}/loss.png", dpi=150)


if __name__ == "__main__":
    main()
