"""Start the ranks of a run on this host with torch's own elastic agent, and report how they end."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tutti.environment import LAYOUT, RUN_DIR, check_seconds
from tutti.launch import failures, lone_agent
from tutti.launch.guard import Guard
from tutti.launch.records import Lost, read_record
from tutti.launch.run_dir import RunDir
from tutti.launch.telling import show

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

    Only rank 0 prints. The output of others goes to `log_dir` only. If one rank fails, the launcher stops
    the others, and one report names the first cause in time, with its traceback, its signal or the end of
    its output, and the lines at which the others waited. On Ctrl-C every rank gets one SIGINT and 30 s.

    Args:
        num_ranks: processes to start.
        script: path of a Python file.
        script_args: its arguments, unchanged.
        layout: the layout of `tutti.distribute` if the script gives none.
        log_dir: the directory for each rank's output.

    Returns:
        0; 130 after Ctrl-C (0 if all ranks then ended with 0); 2 for a `TuttiError`; 1 otherwise.
    """
    check_seconds()
    made = RunDir()
    _silence_agent()
    try:
        return _Run(num_ranks, made.path, log_dir).play([script, *script_args], layout)
    finally:
        made.remove()


class _Run:
    """One run of the agent, and the report of its end."""

    def __init__(self, num_ranks: int, run_dir: Path, log_dir: Path | None) -> None:
        self._num_ranks, self._run_dir, self._log_dir = num_ranks, run_dir, log_dir
        self._logs_at = log_dir or run_dir / "logs"
        self._guard = Guard(run_dir, num_ranks)

    def play(self, words: Sequence[str], layout: str) -> int:
        """Run a script with its arguments; the exit code."""
        config = _config(self._num_ranks, self._logs_at)
        command = [_escape(word) for word in ("-m", "tutti.launch.worker", *words)]
        environment = _worker_environment(self._num_ranks, self._run_dir, layout)
        try:
            with _environment(environment), _signals_kept(), self._guard:
                elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as exc:
            return self._failed({rank: one.exitcode for rank, one in exc.failures.items()})
        except SignalException as exc:
            return self._ended_by(exc.sigval)
        ranks = range(self._num_ranks)
        lost = [found for rank in ranks if (found := read_record(self._run_dir, Lost, rank))]
        return self._without(lost) if lost else 0

    def _failed(self, codes: dict[int, int]) -> int:
        ends = self._ends(codes)
        show(f"{failures.report(ends)}\n{failures.where_logs(self._log_dir)}")
        return failures.exit_code(ends)

    def _ended_by(self, number: int) -> int:
        """The code after a signal: 0 if all scripts ended well after Ctrl-C."""
        ends = self._ends({})
        well = all(end.ended is not None and end.ended.code == 0 for end in ends)
        if number == signal.SIGINT and well:
            return 0
        show(failures.ended_by(number, ends))
        return 128 + number

    def _without(self, lost: list[Lost]) -> int:
        """The code of a run that has lost some replicas: 0 if one of them has finished."""
        codes = {one.rank: one.code for one in lost}
        if len(lost) == self._num_ranks:
            return self._failed(codes)
        ends = self._ends(codes)
        for one in lost:
            end = ends[one.rank]
            line = f"rank {one.rank} {end.how}: the others went on without replica {one.replica}"
            show(f"{line}{failures.details(end)}")
        return 0

    def _ends(self, codes: dict[int, int]) -> list[failures.RankEnd]:
        logs = _stderr_logs(self._logs_at)
        return failures.read_ends(self._run_dir, codes, self._num_ranks, logs, self._guard.seen)


def _config(num_ranks: int, logs_at: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="tutti",
        role="rank",
        rdzv_backend=lone_agent.BACKEND,
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
        RUN_DIR.name: str(run_dir),
        # Else the agent opens a store for its ranks on every interface, writable by anybody.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if layout:
        environment[LAYOUT.name] = layout
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment[name] = os.environ.get(name, "lo")
    return environment


def _stderr_logs(logs_at: Path) -> dict[int, Path]:
    return {int(path.parent.name): path for path in logs_at.glob("*/attempt_0/*/stderr.log")}


def _escape(word: str) -> str:
    """The agent replaces $-macros in arguments; it turns $$ into $."""
    return word.replace("$", "$$")


def _silence_agent() -> None:
    """Silence the agent's log, which repeats the report."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set the agent's environment, which it passes on to the workers."""
    before = os.environ.copy()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
