"""What making a program takes: each phase, in seconds, for a Llama of the 8B configuration.

    python -m benchmarks.compile                       # 2, 4, 8 and 32 layers
    python -m benchmarks.compile --layers 2 --profile propagate
    python -m benchmarks.compile --lengths 64          # what a new length costs a GPT-2 of 12 layers

One process, no process group; model and batch are on the meta device, so nothing is computed. Seconds
are those of the processor, which a busy machine does not change much. Each number of layers runs in a
process of its own, for what it takes in memory at most.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import pstats
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tutti
from benchmarks.command_line import parser
from tutti.capture.captured import copied
from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.propagate.plan import plan

LAYOUT = "data=128 tensor=8 zero=3"
PLACE = {
    "*.[qkv]_proj.weight": "tensor, -",
    "*.gate_proj.weight": "tensor, -",
    "*.up_proj.weight": "tensor, -",
    "*.o_proj.weight": "-, tensor",
    "*.down_proj.weight": "-, tensor",
}


def llama(num_layers: int) -> LlamaForCausalLM:
    """The model of the 8B configuration with this many layers, without memory for its weights."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def train_step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """One step of pre-training, with clipping."""
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def lengths(layout: str, num_lengths: int, width: int = 768) -> None:
    """Print what each of three or more lengths costs a GPT-2 of 12 layers beside a step, and their memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = tutti.distribute(train_step, model, optimizer, layout)

    def called(length: int) -> float:
        tokens = torch.randint(model.config.vocab_size, (2, length))
        begin = time.process_time()
        step(tokens)
        return time.process_time() - begin

    seconds, again = [], 0.0
    for k in range(num_lengths):
        first, again = called(16 + k), called(16 + k)  # a step of more tokens takes longer
        seconds.append(first - again)
        if k in (0, 2, num_lengths - 1):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"after length {k + 1}: peak {peak:.2f} GB")
    later = sorted(seconds[3:] or seconds[2:])  # the third is traced with symbols
    print(
        f"first length {seconds[0]:.2f} s, second {seconds[1]:.2f}, third {seconds[2]:.2f}, "
        f"later {later[len(later) // 2]:.2f} ({later[0]:.2f} to {later[-1]:.2f}, in the mean "
        f"{sum(later) / len(later):.2f}), a step {again:.2f}"
    )


class Phases:
    """Seconds by phase; the phase named `profiled` is profiled and printed."""

    def __init__(self, profiled: str = "") -> None:
        self.seconds: dict[str, float] = {}
        self.profiled = profiled

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        """Call `function` as the phase `name`."""
        profile = cProfile.Profile() if name == self.profiled else None
        begin = time.process_time()
        result = profile.runcall(function) if profile else function()
        self.seconds[name] = time.process_time() - begin
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return result


def compiled(num_layers: int, batch: int, sequence: int, phases: Phases) -> Program:
    """The program of a step, made as `Step.program_of` makes it, then the passes."""
    model = phases.run("model", lambda: llama(num_layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    captured = phases.run("capture", lambda: capture(train_step, model, optimizer, (tokens,)))
    made = phases.run("propagate", lambda: plan(copied(captured), Layout.parse(LAYOUT), PLACE))
    program = phases.run("partition", lambda: partition(made))
    donated = frozenset(captured.updated)
    phases.run("passes", lambda: optimized(program, Target(donated=donated)))
    return program


def kind_of(node: Any) -> tuple[str, str, str]:
    """The name of a collective, its axes, and the region that it works for."""
    region = node.meta["user"].meta.get("region", "update")
    return node.target.__name__, "+".join(node.args[1]), region


def describe(num_layers: int, args: argparse.Namespace) -> None:
    """Print what making the program of so many layers took, and what is in it."""
    torch.set_num_threads(1)
    phases = Phases(args.profile)
    begin = time.perf_counter()
    program = compiled(num_layers, args.batch, args.sequence, phases)
    wall = time.perf_counter() - begin
    kinds = Counter(map(kind_of, program.collectives))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    spent = "".join(f"{name} {s:.1f}  " for name, s in phases.seconds.items())
    print(
        f"{num_layers} layers: {spent}total {sum(phases.seconds.values()):.1f} s (wall {wall:.1f})"
    )
    print(
        f"  peak {peak:.2f} GB, {len(program.captured.graph.nodes)} nodes captured, "
        f"{len(program.graph.nodes)} in the program, {len(program.collectives)} collectives:"
    )
    for (kind, axes, region), count in sorted(kinds.items()):
        print(f"  {count:>6}  {kind} over {axes} in {region}")


def main() -> None:
    """Each number of layers in a process of its own."""
    command = parser(
        __doc__,
        **{"layers": [2, 4, 8, 32], "batch": 128, "sequence": 4096, "profile": "", "lengths": 0},
        **{"layout": "data=1", "width": 768},  # of --lengths
    )
    args = command.parse_args()
    if args.lengths:
        lengths(args.layout, max(args.lengths, 3), args.width)
        return
    for num_layers in args.layers:
        one = multiprocessing.get_context("spawn").Process(target=describe, args=(num_layers, args))
        one.start()
        one.join()


if __name__ == "__main__":
    main()
