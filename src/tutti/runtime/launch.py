"""Start the ranks of a run on this host with torch's own elastic agent, and report how they end."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tutti.runtime import failures
from tutti.runtime.guard import Guard
from tutti.runtime.records import LAYOUT, RUN_DIR, Exit, Lost, read_record

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
MONITOR_SECONDS = 0.1


def launch(
    num_ranks: int,
    script: str,
    script_args: Sequence[str] = (),
    layout: str = "",
    *,
    log_dir: Path | None = None,
) -> int:
    """Run `script` on `num_ranks` ranks of this host; the exit code for the launcher.

    Only rank 0 prints. What others write goes to `log_dir`, by default a new directory that is
    removed unless the run fails. If one rank fails, the others are stopped and one report names the
    rank, its traceback or signal, and where the others waited. On Ctrl-C every rank gets one SIGINT
    and 30 s.

    Args:
        num_ranks: processes to start.
        script: path of a Python file.
        script_args: its arguments, passed as they are.
        layout: what `tutti.distribute` uses where the script gives no layout.
        log_dir: where to keep each rank's output.

    Returns:
        0; 130 after Ctrl-C (0 if all ranks then ended with 0); 2 for a `TuttiError`; 1 otherwise.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="tutti-"))
    logs_at = log_dir or run_dir / "logs"
    config = _config(num_ranks, run_dir, logs_at)
    command = ["-m", "tutti.runtime.worker", script, *script_args]
    _silence_agent()
    code = 1
    try:
        environment = _worker_environment(num_ranks, run_dir, layout)
        with _environment(environment), _signals_kept(), Guard(run_dir, num_ranks):
            code = _run(config, [_escape(word) for word in command], run_dir, logs_at)
    finally:
        if code in (0, 128 + signal.SIGINT):
            shutil.rmtree(run_dir, ignore_errors=True)
    return code


def _run(config: LaunchConfig, command: list[str], run_dir: Path, logs_at: Path) -> int:
    num_ranks = config.nproc_per_node
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as exc:
        codes = {rank: failure.exitcode for rank, failure in exc.failures.items()}
        ends = failures.read_ends(run_dir, codes, num_ranks, _stderr_logs(logs_at))
        print(failures.report(ends), f"\nlogs in {logs_at}", sep="", file=sys.stderr, flush=True)
        return failures.exit_code(ends)
    except SignalException as exc:
        exits = [read_record(run_dir, Exit, rank) for rank in range(num_ranks)]
        if exc.sigval == signal.SIGINT and all(e is not None and e.code == 0 for e in exits):
            return 0
        return 128 + exc.sigval
    lost = [found for rank in range(num_ranks) if (found := read_record(run_dir, Lost, rank))]
    return _without(lost, run_dir, num_ranks, logs_at) if lost else 0


def _without(lost: list[Lost], run_dir: Path, num_ranks: int, logs_at: Path) -> int:
    """The code of a run of which some replicas were lost: good while one of them has come to its end."""
    codes = {one.rank: one.code for one in lost}
    ends = failures.read_ends(run_dir, codes, num_ranks, _stderr_logs(logs_at))
    if len(lost) == num_ranks:
        print(failures.report(ends), f"\nlogs in {logs_at}", sep="", file=sys.stderr, flush=True)
        return failures.exit_code(ends)
    for one in lost:
        line = f"rank {one.rank} {ends[one.rank].how}: the others went on without replica {one.replica}"
        print(line, file=sys.stderr, flush=True)
    return 0


def _config(num_ranks: int, run_dir: Path, logs_at: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="tutti",
        role="rank",
        # The agent meets nobody but itself: a file does, and nothing listens on any interface.
        rdzv_backend="c10d",
        rdzv_endpoint=str(run_dir / "agent.store"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs_at), redirects=dict.fromkeys(range(1, num_ranks), Std.ALL)
        ),
    )


def _worker_environment(num_ranks: int, run_dir: Path, layout: str) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        RUN_DIR: str(run_dir),
    }
    if layout:
        environment[LAYOUT] = layout
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment[name] = os.environ.get(name, "lo")
    return environment


def _stderr_logs(logs_at: Path) -> dict[int, Path]:
    return {int(path.parent.name): path for path in logs_at.glob("*/attempt_0/*/stderr.log")}


def _escape(word: str) -> str:
    """The agent replaces $-macros in arguments; a doubled $ comes out as one."""
    return word.replace("$", "$$")


def _silence_agent() -> None:
    """The agent logs what the report says better."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """The agent hands its own environment on to the workers."""
    before = os.environ.copy()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The agent sets signal handlers and leaves them."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
