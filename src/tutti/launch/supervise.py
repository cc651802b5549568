"""Starts workers and servers on this host, and continues the run if it can do without a lost one.

a server is killed                restarts it; it continues from its records
a worker ends, async or bounded   the others continue; a rank that fails takes its worker with it.
                                  If its script failed, the run's exit code says so at the end
a worker fails, step              stops all
a worker ends early, step         the others continue; its server has this process name it
a script is wrong (a server's)    stops all
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tutti.environment import LAYOUT, RECORDS, ROLE, RUN_DIR, SECRET, check_seconds
from tutti.launch import failures
from tutti.launch.guard import Guard
from tutti.launch.raised_signals import Signaled, signals_raised
from tutti.launch.records import Failure, read_record
from tutti.launch.roles import SERVER, WORKER, Role
from tutti.launch.run_dir import RunDir
from tutti.launch.telling import show
from tutti.layout import Layout
from tutti.server.protocol import consistency

POLL_SECONDS, STOP_SECONDS = 0.05, 10.0
# A server that dies this often within a minute is not restarted.
MOST_RESTARTS, MINUTE_SECONDS = 20, 60.0


class Process(Protocol):
    """The used interface of a `subprocess.Popen`."""

    returncode: int | Any

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


@dataclass
class Started:
    """One process of the run, and its predecessors."""

    role: Role
    rank: int
    process: Process
    starts: list[float] = field(default_factory=list)

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None


class Supervisor:
    """Runs a script as workers and servers on this host.

    Args:
        layout: of the whole run, which may have more of both on other hosts.
        roles: the roles to start here.
        command: the script and its arguments.
        environment: for all of them, beside this process's own.
        log_dir: the directory for the output of all but the first; by default it is dropped.
    """

    def __init__(
        self,
        layout: Layout,
        roles: Sequence[Role],
        command: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.layout, self.roles, self.command = layout, list(roles), list(command)
        check_seconds({**os.environ, **(environment or {})})
        self._made = RunDir()
        self.run_dir, self._kept = self._made.path, log_dir
        self.log_dir = log_dir or self.run_dir / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // len(self.roles))
        self.environment = {
            "OMP_NUM_THREADS": str(threads),
            SECRET.name: secrets.token_hex(32),
            RECORDS.name: str(self.run_dir / "records"),
            **os.environ,
            **(environment or {}),
            RUN_DIR.name: str(self.run_dir),
            LAYOUT.name: str(layout),
        }
        self.apart = consistency.parse(layout.sync).apart
        self.started: list[Started] = []
        self.codes: dict[int, int] = {}
        self._num_ranks = layout.num_ranks + layout.server
        self._guard = Guard(self.run_dir, self._num_ranks, ends_others=False)

    def run(self) -> int:
        """The exit code: 0 if a worker (of servers alone: every server) ended well, and no script failed."""
        try:
            with self._guard, signals_raised():
                by = self._play()
            if by is not None:
                show(failures.ended_by(by, self._ends()))
                return 128 + by
            code = self._code()
            self._report(code)
            return code
        finally:
            self._made.remove()

    def _play(self) -> signal.Signals | None:
        """Run until the end; the signal that has ended the run."""
        try:
            self.started = [self._start(role) for role in self.roles]
            self._watch()
        except (KeyboardInterrupt, Signaled) as exc:
            number = exc.number if isinstance(exc, Signaled) else signal.SIGINT
            self._stop(number)
            return number
        finally:
            self._stop(signal.SIGTERM)
        return None

    def _start(self, role: Role) -> Started:
        rank = role.rank(self.layout)
        # a worker meets only the servers, and its own ranks
        size = self.layout.worker_size if role.kind == WORKER else 1
        environment = {
            **self.environment,
            ROLE.name: str(role),
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
        }
        process = self.spawn(environment, None if role == self.roles[0] else self._log(role))
        return Started(role, rank, process, [time.monotonic()])

    def spawn(self, environment: dict[str, str], log: Path | None) -> Process:
        """Start one process; its output goes to `log`, or to this process's output."""
        words = [sys.executable, "-m", "tutti.launch.worker", *self.command]
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(log, "ab")) if log is not None else None
            return subprocess.Popen(  # noqa: S603  # the user's own command, without a shell
                words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _log(self, role: Role) -> Path:
        return self.log_dir / f"{str(role).replace(' ', '')}.log"

    def _watch(self) -> None:
        """Watch until the workers have ended, or, without workers here, the servers."""
        while True:
            for one in [x for x in self.started if not x.lives and x.rank not in self.codes]:
                self._ended(one)
            workers = [x for x in self.started if x.role.kind == WORKER]
            waiting = [x for x in workers or self.started if x.rank not in self.codes]
            if not waiting or self._hopeless():
                self._let_servers_end() if workers and not self._hopeless() else None
                return
            time.sleep(POLL_SECONDS)

    def _ended(self, one: Started) -> None:
        code = one.process.returncode
        failed = read_record(self.run_dir, Failure, one.rank)
        recent = [x for x in one.starts if time.monotonic() - x < MINUTE_SECONDS]
        if one.role.kind == SERVER and code < 0 and failed is None and len(recent) < MOST_RESTARTS:
            show(f"{one.role} died (signal {-code}); it goes on from its records")
            again = self._start(one.role)
            one.process, one.starts = again.process, [*recent, *again.starts]
            return
        self.codes[one.rank] = code
        fellows = [x for x in self._worker_of(one) if x.lives]
        if one.role.kind == WORKER and code and self.apart:
            first = all(
                self.codes.get(x.rank, 0) == 0 for x in self._worker_of(one) if x is not one
            )
            if first:
                cause, end = self._cause(one)
                going_on = "; the others go on" if self._others(one) else ""
                show(f"{cause.role} {end.said}{going_on}")
            for x in fellows:  # all ranks of a worker end together
                self._guard.kill(x.rank)
                with contextlib.suppress(ProcessLookupError):
                    x.process.send_signal(signal.SIGKILL)

    def _cause(self, one: Started) -> tuple[Started, failures.RankEnd]:
        """Of the ranks of its worker that have ended by now, the one whose end ended the others."""
        dead = {x.rank: x for x in self._worker_of(one) if not x.lives}
        codes = {rank: x.process.returncode for rank, x in dead.items()}
        end = failures.first_cause([end for end in self._ends(codes) if end.rank in dead])
        return dead[end.rank], end

    def _worker_of(self, one: Started) -> list[Started]:
        """The ranks of a worker, or a server."""
        kind, number = one.role.kind, one.role.number
        return [x for x in self.started if (x.role.kind, x.role.number) == (kind, number)]

    def _others(self, one: Started) -> bool:
        """Whether another worker may still train: one of this host, or of another."""
        here = [x for x in self.started if x.role.kind == WORKER]
        lives = any(x.lives for x in here if x.role.number != one.role.number)
        return lives or len({x.role.number for x in here}) < self.layout.num_replicas

    def _hopeless(self) -> bool:
        """Whether the run cannot go on: a server has failed, or under `step` a worker."""
        kinds = {x.rank: x.role.kind for x in self.started}
        return any(
            code and (kinds[rank] == SERVER or not self.apart) for rank, code in self.codes.items()
        )

    def _let_servers_end(self) -> None:
        """Servers of this host end by themselves once the workers of all hosts have left.

        If every worker of the run has failed here, some may never have joined: do not wait for servers.
        """
        workers = [x for x in self.started if x.role.kind == WORKER]
        if len(workers) == self.layout.num_ranks and not any(self._ended_well(x) for x in workers):
            return
        servers = [x for x in self.started if x.role.kind == SERVER]
        while any(x.lives for x in servers):
            time.sleep(POLL_SECONDS)

    def _ended_well(self, one: Started) -> bool:
        """Whether all ranks of a worker, or a server, have ended with 0 or have not ended."""
        return all(self.codes.get(x.rank, 0) == 0 for x in self._worker_of(one))

    def _code(self) -> int:
        kind = WORKER if any(r.kind == WORKER for r in self.roles) else SERVER
        own = [self._ended_well(x) for x in self.started if x.role.kind == kind]
        ends = self._ends()
        if self._hopeless() or not any(own) or any(end.is_of_script for end in ends):
            return failures.exit_code(ends)
        return 0

    def _failed(self) -> bool:
        return any(self.codes.values())

    def _report(self, code: int) -> None:
        if not code and self._failed():
            lost = {x.role.number: x for x in self.started if self.codes.get(x.rank)}
            for one in lost.values():
                cause, end = self._cause(one)
                more = failures.details(end)
                show(f"rank {end.rank} {end.said}: the others went on without {cause.role}{more}")
            show(failures.where_logs(self._kept))
        elif self._failed():
            show(f"{failures.report(self._ends())}\n{failures.where_logs(self._kept)}")

    def _ends(self, codes: Mapping[int, int] | None = None) -> list[failures.RankEnd]:
        """Of the processes of this host; `codes` are exit codes beside those at hand."""
        logs = {x.rank: self._log(x.role) for x in self.started if x.role != self.roles[0]}
        seen = self._guard.seen
        every = failures.read_ends(
            self.run_dir, {**self.codes, **(codes or {})}, self._num_ranks, logs, seen
        )
        here = {x.rank for x in self.started}
        return [end for end in every if end.rank in here]

    def _stop(self, number: int) -> None:
        """Send a signal to all live processes, and wait; the guard kills those that do not end."""
        living = [x for x in self.started if x.lives]
        for one in living:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(number)
        until = time.monotonic() + STOP_SECONDS
        while any(x.lives for x in living) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
