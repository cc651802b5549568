"""The memory of ranks that load a model on the meta device from files, next to its size.

    python -m benchmarks.load_weights                       # 800 MB over the ranks of data=4 zero=3
    python -m benchmarks.load_weights --depth 10 --layout "data=2 zero=3"

Linear layers of 4 MB each, in files of 200 MB with an index. Each rank builds the model on the meta device,
loads, and makes one evaluation call, which lays the weights out. Prints the growth of its largest resident
memory until they lie there, and over the whole call, in shares of the model. The ranks share no memory, as on
hosts of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import tutti
from benchmarks.command_line import parser
from tutti.launch.ranks import ensure_process_group
from tutti.layout import Layout
from tutti.saving import model_file
from tutti.saving.weight_files import INDEX_FILE
from tutti.state.residence import settle

WIDTH = 1024
FILE_NBYTES = 200 * 10**6


class Loaded(NamedTuple):
    """Bytes of resident memory above those before, to load and with the call; the result."""

    load_nbytes: int
    nbytes: int
    total: float


def model(depth: int) -> nn.Sequential:
    """Linear layers without biases."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """One number that depends on every weight."""
    with torch.no_grad():
        return model(x).square().mean()


def write(folder: Path, depth: int) -> float:
    """Write a model in several files; its result on a batch."""
    torch.manual_seed(0)
    made = model(depth)
    step = tutti.distribute(evaluate, made, None, "")
    with mock.patch.object(model_file, "FILE_NBYTES", FILE_NBYTES):
        step.save(folder / INDEX_FILE)
    return float(evaluate(made, batch()))


def batch() -> Tensor:
    """Eight rows."""
    return torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


def largest(*, anew: bool = False) -> int:
    """The largest resident memory of this process in bytes, since it was last measured `anew`."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))


def load(pipe: Connection, rank: int, layout: str, folder: str, depth: int) -> None:
    """One rank."""
    world = str(Layout.parse(layout).num_ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TUTTI_RUN_DIR": folder, "OMP_NUM_THREADS": "1"}
    os.environ["TUTTI_SHARED_MEMORY"] = "off"
    torch.set_num_threads(1)
    ensure_process_group()
    small: Any = tutti.distribute(evaluate, model(1), None, layout)
    small(batch())  # what the interpreter needs to capture and run at all
    with torch.device("meta"):
        made = model(depth)
    step = tutti.distribute(evaluate, made, None, layout)
    after: list[int] = []

    def settled(*args: Any) -> None:
        settle(*args)
        after.append(largest())

    before = largest(anew=True)
    step.load(folder)
    with mock.patch("tutti.modes.plain.settle", settled):
        total = float(step(batch()))
    pipe.send(Loaded(after[0] - before, largest() - before, total))


def loaded(layout: str, folder: Path, depth: int) -> list[Loaded]:
    """What each rank needed."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe(duplex=False) for _ in range(Layout.parse(layout).num_ranks)]
    ranks = [
        context.Process(target=load, args=(there, rank, layout, str(folder), depth))
        for rank, (_, there) in enumerate(pairs)
    ]
    for one in ranks:
        one.start()
    for _, there in pairs:
        there.close()
    found = [here.recv() for here, _ in pairs]
    for one in ranks:
        one.join()
    return found


def main() -> None:
    """Print a line for each rank."""
    args = parser(__doc__, layout="data=4 zero=3", depth=200).parse_args()
    nbytes = 4 * WIDTH * WIDTH * args.depth
    with tempfile.TemporaryDirectory() as folder:
        wanted = write(Path(folder), args.depth)
        print(f"{nbytes / 1e6:.0f} MB, {args.layout}")
        for rank, one in enumerate(loaded(args.layout, Path(folder), args.depth)):
            assert abs(one.total - wanted) <= 1e-5 * abs(wanted), (one.total, wanted)
            shares = one.load_nbytes / nbytes, one.nbytes / nbytes
            print(
                f"rank {rank}: {shares[0]:.3f} of the model to load it, {shares[1]:.3f} with a call"
            )


if __name__ == "__main__":
    main()
