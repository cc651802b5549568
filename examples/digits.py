"""Train a small convolutional net with BatchNorm on handwritten digits: one device, plus one line.

python examples/digits.py                                        # one device
tutti run -n 2 --layout "data=2" examples/digits.py              # statistics of the whole batch
tutti run -n 2 --layout "data=2 zero=3" examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py
tutti verify --layout "data=2 zero=3" examples/digits.py         # show that they are the same
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tutti

RANK = int(os.environ.get("RANK", "0"))
NUM_TEST = 360


def make_model() -> nn.Module:
    def block(num_in: int, num_out: int, stride: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(num_out), nn.ReLU())

    features = [block(1, 16), block(16, 32, stride=2), block(32, 64, stride=2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def train_step(model, optimizer, images, labels):
    model.train()
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def eval_step(model, images):
    model.eval()
    return model(images)


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """1797 images of 8 x 8 pixels and their labels, shuffled, with mean 0 and variance 1."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return ((images - images.mean()) / images.std())[order], labels.long()[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"epochs": 12, "batch": 64, "lr": 0.05, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    args, console = parser.parse_args(), Console(quiet=RANK != 0, highlight=False, soft_wrap=True)

    images, labels = digits(args.seed)
    train_images, train_labels = images[NUM_TEST:], labels[NUM_TEST:]
    test_images, test_labels = images[:NUM_TEST], labels[:NUM_TEST]

    torch.manual_seed(args.seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    step = tutti.distribute(train_step, model, optimizer, seed=args.seed)
    evaluate = tutti.distribute(eval_step, model)

    began = time.perf_counter()
    for epoch in range(args.epochs):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
        order = torch.randperm(len(train_labels), generator=generator)
        batches = order[: len(order) // args.batch * args.batch].split(args.batch)
        losses = [step(train_images[rows], train_labels[rows]) for rows in batches]
        schedule.step()
        right = (evaluate(test_images).argmax(1) == test_labels).double().mean().item()
        loss, seconds = torch.stack(losses).mean().item(), time.perf_counter() - began
        console.print(
            f"epoch {epoch + 1:2}  train loss {loss:.4f}  "
            f"test accuracy {right:.2%}  {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
