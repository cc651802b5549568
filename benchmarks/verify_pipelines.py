"""Every model under every schedule of pipelines, compared with one device in float64 on virtual ranks.

    python -m benchmarks.verify_pipelines                          # all cells, one process, an hour or so
    python -m benchmarks.verify_pipelines --models t5 unet --layouts zbv --out runs/verify

A cell is `verify` of two steps: the largest relative difference of any loss or state tensor. Each model, one
of the test suite's, is captured once for all its cells. Kept as a table and as JSON, written after each cell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.cells import Cell, cell, write
from benchmarks.command_line import chosen, parser
from tutti.layout import Layout
from tutti.verification.verdict import Subject

# The models are those of the test suite.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import zoo
from zoo_models import GPT, UNet
from zoo_steps import Batch, image_batch, labels_step, masked_step, plain_step, token_batch, valid

# 4, 7 and the 8 parts of data=2 micro=4 divide it.
ROWS = 56
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved(3)", "zb", "zbv")
LAYOUTS = (
    *(
        f"pipe={pipe} micro={micro} schedule={schedule}"
        for pipe in (2, 4)
        for micro in (4, 7)
        for schedule in SCHEDULES
    ),
    "pipe=2 data=2 tensor=2 zero=3 micro=4",
)


def translation(which: int) -> Batch:
    """Source tokens, their attention mask and target tokens, unevenly long."""
    tokens, targets = token_batch(which, rows=ROWS)
    keep = valid(tokens.shape[1], which, ROWS)
    return tokens.masked_fill(~keep, 0), keep.long(), targets


_TOKENS, _IMAGES = partial(token_batch, rows=ROWS), partial(image_batch, rows=ROWS)
MODELS: dict[str, Callable[[], zoo.Built]] = {
    "gpt": lambda: zoo.build(GPT, _TOKENS, plain_step),
    "llama": lambda: zoo.build(zoo.LLAMA, _TOKENS, labels_step),
    "gpt2": lambda: zoo.build(zoo.GPT2, _TOKENS, labels_step),
    "t5": lambda: zoo.build(zoo.T5, translation, masked_step),
    "vit": lambda: zoo.build(zoo.VIT, _IMAGES, labels_step),
    "unet": lambda: zoo.build(UNet, _IMAGES, plain_step),
}


def verify(model: str, subject: Subject, layout: str) -> Cell:
    """One cell."""
    place = zoo.CASES[model].place if "tensor" in layout else None
    return cell(model, layout, lambda: (subject.verdict(Layout.parse(layout), place).max_error, ()))


def cells(models: Iterable[str], layouts: list[str]) -> Iterator[Cell]:
    """All cells, model by model."""
    for name in models:
        step, model, optimizer, batches = MODELS[name]()
        subject = Subject(step, model, optimizer, batches[0])
        for layout in layouts:
            yield verify(name, subject, layout)


def main() -> None:
    """Verify and keep."""
    options = {"models": list(MODELS), "layouts": list(LAYOUTS)}
    command = parser(__doc__, **options, out=Path("runs/verify-pipelines"))
    args = command.parse_args()
    chosen(command, "models", args.models, MODELS)
    layouts = [one for one in LAYOUTS if any(word in one for word in args.layouts)]
    found: list[Cell] = []
    note = f"batch of {ROWS}, two steps"
    for one in cells(args.models, layouts):
        found.append(one)
        print(f"{one.model:6} {one.layout:50} {one} ({one.seconds:.1f} s)", flush=True)
        write(found, args.out, "Pipelines verified in float64", note)
    sys.exit(any(not c.ok for c in found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
