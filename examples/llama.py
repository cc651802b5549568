"""Train an unmodified Llama of Hugging Face, with random weights: one device, plus one line.

python examples/llama.py                                         # one device
tutti run -n 2 --layout "data=2 zero=1" examples/llama.py
tutti run -n 2 --layout "tensor=2" examples/llama.py
torchrun --nproc-per-node 2 examples/llama.py
tutti verify --layout "tensor=2" examples/llama.py               # show that they are the same
"""

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
SPLIT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
PLACE = {f"*.{name}.weight": "tensor, -" for name in SPLIT}
PLACE |= {"*.o_proj.weight": "-, tensor", "*.down_proj.weight": "-, tensor"}


def make_model(num_layers: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "max_position_embeddings": WINDOW}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": num_layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


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


def windows(text: Tensor, count: int) -> Tensor:
    start = torch.linspace(0, len(text) - WINDOW, count).long()[:, None]  # spread evenly
    return text[start + torch.arange(WINDOW)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"steps": 300, "batch": 16, "layers": 4, "lr": 3e-3, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    args, console = parser.parse_args(), Console(quiet=RANK != 0, highlight=False, soft_wrap=True)

    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    train_text, valid_text = text.tensor_split([len(text) * 9 // 10])
    torch.manual_seed(args.seed)
    model = make_model(args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=30)
    step = tutti.distribute(train_step, model, optimizer, place=PLACE, seed=args.seed)
    evaluate = tutti.distribute(eval_step, model, place=PLACE)

    samples = windows(train_text, args.steps * args.batch)
    loader = tutti.loader(samples, args.batch, shuffle=True, seed=args.seed)
    began = time.perf_counter()
    for tokens in loader:
        loss = step(tokens)
        warmup.step()
        if step.num_steps % 50 == 0 or step.num_steps == args.steps:
            parts = windows(valid_text, 4 * args.batch).split(args.batch)
            valid = torch.stack([evaluate(part) for part in parts]).mean()
            console.print(
                f"step {step.num_steps:4}  loss {loss:.3f}  validation {valid:.3f} nats per byte  "
                f"{time.perf_counter() - began:.1f} s"
            )


if __name__ == "__main__":
    main()
