"""Train an unmodified Llama of Hugging Face, with random weights: one device, plus one line.

python examples/llama.py                                         # one device
tutti run -n 2 --layout "data=2 zero=1" examples/llama.py
tutti run -n 2 --layout "tensor=2" examples/llama.py
torchrun --nproc-per-node 2 examples/llama.py
tutti verify --layout "tensor=2" examples/llama.py               # show that they are the same
"""

from __future__ import annotations

import argparse
import os
import time
from pydoc_data.topics import topics

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tutti

RANK = int(os.environ.get("RANK", "0"))
WINDOW, VOCABULARY = 128, 256  # tokens are bytes

# Used when the layout has a "tensor" axis; without one it changes nothing.
PLACE = {
    "*.q_proj.weight": "tensor, -",
    "*.k_proj.weight": "tensor, -",
    "*.v_proj.weight": "tensor, -",
    "*.o_proj.weight": "-, tensor",
    "*.gate_proj.weight": "tensor, -",
    "*.up_proj.weight": "tensor, -",
    "*.down_proj.weight": "-, tensor",
}


def make_model(num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=WINDOW,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train_step(model, optimizer, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def eval_step(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def windows(text: Tensor, start: Tensor) -> Tensor:
    return text[start[:, None] + torch.arange(WINDOW)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"steps": 300, "batch": 16, "layers": 4, "lr": 3e-3, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    args, console = parser.parse_args(), Console(quiet=RANK != 0, highlight=False, soft_wrap=True)

    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    train_text, valid_text = text.tensor_split([len(text) * 9 // 10])
    valid_start = torch.linspace(0, len(valid_text) - WINDOW, 4 * args.batch).long()

    torch.manual_seed(args.seed)
    model = make_model(args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=30)
    step = tutti.distribute(train_step, model, optimizer, place=PLACE, seed=args.seed)
    evaluate = tutti.distribute(eval_step, model, place=PLACE)

    began = time.perf_counter()
    for index in range(args.steps):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + index)
        start = torch.randint(len(train_text) - WINDOW, (args.batch,), generator=generator)
        loss = step(windows(train_text, start))
        warmup.step()
        if (index + 1) % 50 == 0 or index + 1 == args.steps:
            losses = [evaluate(windows(valid_text, part)) for part in valid_start.split(args.batch)]
            valid, seconds = torch.stack(losses).mean().item(), time.perf_counter() - began
            console.print(
                f"step {index + 1:4}  loss {loss.item():.3f}  "
                f"validation {valid:.3f} nats per byte  {seconds:.1f} s"
            )


if __name__ == "__main__":
    main()
