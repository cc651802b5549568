"""Two hosts on a slow link: replicas that agree every 50 steps against gradients at every step.

    python -m benchmarks.two_hosts          # as root: two network namespaces, 100 Mbit/s, 20 ms each way

One rank a host trains the GPT of 29.5 M parameters, one sample of 128 tokens each. After a first step, tokens
per second and the bytes that the first host's interface has sent are those of whole steps; of DiLoCo of 50
with one round. The cable is `benchmarks.slow_link`. Writes `benchmarks/results/two-hosts.json`, and a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_line import parser
from benchmarks.machine import describe
from benchmarks.slow_link import INTERFACE

OUT = Path(__file__).parent / "results" / "two-hosts.json"
CASE, MBIT, DELAY_SECONDS, PORT = "gpt-29.5M", 100, 0.02, 29517
SECONDS = 240


@dataclass(frozen=True)
class Way:
    """A layout, and how many steps are measured."""

    layout: str
    steps: int


WAYS = (
    Way("data=2", 2),
    Way("replica=2 sync=diloco(every=50)", 50),
)


def measure(way: Way) -> dict[str, Any]:
    """On a rank: the steps of one way."""
    import torch
    import torch.distributed as dist

    import tutti
    from benchmarks.models import CASES, optimizer, plain_step

    torch.set_num_threads(1)
    case = CASES[CASE]
    model = case.model()
    step = tutti.distribute(plain_step(case), model, optimizer(model), way.layout)
    batches = [case.batch(i, 2) for i in range(8)]
    step(*batches[0])
    dist.barrier()
    sent, began = _sent_nbytes(), time.perf_counter()
    for k in range(way.steps):
        step(*batches[k % 8])
    seconds, nbytes = time.perf_counter() - began, _sent_nbytes() - sent
    tokens = case.units(2) * way.steps
    return {
        "layout": way.layout,
        "steps": way.steps,
        "tokens_per_second": tokens / seconds,
        "sent_nbytes_per_step": nbytes / way.steps,
    }


def _sent_nbytes() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


@contextmanager
def hosts() -> Iterator[list[str]]:
    """Two namespaces joined by a slow cable; 10.78.0.1 and .2."""
    tag = uuid.uuid4().hex[:6]
    names = [f"tutti-{tag}-{i}" for i in range(2)]
    link: subprocess.Popen[str] | None = None
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        words = [
            sys.executable,
            "-m",
            "benchmarks.slow_link",
            *names,
            str(MBIT),
            str(DELAY_SECONDS),
        ]
        link = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert link.stdout is not None and link.stdout.readline() == "ready\n"
        yield names
    finally:
        if link is not None:
            link.kill()
            link.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_both(names: list[str], number: int) -> dict[str, Any]:
    """What the first host's rank found for a way."""
    script = [str(Path(__file__)), "--way", str(number)]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.getenv("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", namespace, *agent, f"--node-rank={i}"]
            + ["--master-addr=10.78.0.1", f"--master-port={PORT + number}", *script],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "PYTHONPATH": path,
            },
        )
        for i, namespace in enumerate(names)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    (line,) = [x for out in outputs for x in out.splitlines() if x.startswith("found ")]
    return json.loads(line.removeprefix("found "))


def table(rows: list[dict[str, Any]]) -> str:
    """Each way, and how it stands to the first."""
    first = rows[0]
    lines = ["| layout | tokens/s | | bytes sent a step | |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        speed = row["tokens_per_second"] / first["tokens_per_second"]
        fewer = first["sent_nbytes_per_step"] / row["sent_nbytes_per_step"]
        lines.append(
            f"| `{row['layout']}` | {row['tokens_per_second']:.1f} | {speed:.1f}x | "
            f"{row['sent_nbytes_per_step'] / 1e6:.2f} MB | {fewer:.1f}x fewer |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all ways, one after the other."""
    command = parser(__doc__)
    command.add_argument("--way", type=int, help=argparse.SUPPRESS)  # on a rank: which to measure
    args = command.parse_args()
    if args.way is not None:
        found = measure(WAYS[args.way])
        if os.environ["RANK"] == "0":
            print("found", json.dumps(found), flush=True)
        return
    link = {"mbit_per_second": MBIT, "delay_seconds_each_way": DELAY_SECONDS}
    rows: list[dict[str, Any]] = []
    with hosts() as names:
        for number in range(len(WAYS)):
            rows.append(on_both(names, number))
            found = {"machine": describe(), "link": link, "case": CASE, "rows": rows}
            OUT.write_text(json.dumps(found) + "\n")
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
