"""Reports an unusually long wait of a rank once: the collective, the late ranks, and their lines.

A thread reads the main thread's stack twice a second, at no cost to a step. It sees collectives and messages
through shared memory, Gloo or a pipeline's channels, and calls of torch.distributed. A wait is unusual after
10 s, and after ten times the median of the last hundred that this thread has seen.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tutti.comm.host.awake import AwakeClock
from tutti.environment import RUN_DIR
from tutti.launch.asking import Answer, answer, ask
from tutti.launch.records import Waited, write_record
from tutti.launch.whereabouts import Stack, Waiting, main_stack, wait
from tutti.stack_reads import reading

LOOK_SECONDS = 0.5
LEAST_SECONDS, TIMES_USUAL = 10.0, 10.0
LEAST_USUAL, NUM_USUAL = 5, 100
_MOST_ASKED = 4


class WaitWatch:
    """Watches the waits of one rank.

    Args:
        rank: of the run; `first` is the run's rank of rank 0 of torch.distributed, and `size` the number of
            its ranks.
        run_dir: that of `tutti run`, if it has started this rank: the others answer there.
        stack: the main thread's, innermost first.
        cpu: seconds that the main thread has computed.
        clock: seconds without the suspensions of this process.
    """

    def __init__(
        self,
        rank: int,
        run_dir: Path | None,
        stack: Callable[[], Stack],
        *,
        first: int = 0,
        size: int = 1,
        cpu: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self._run_dir, self._stack, self._cpu = rank, run_dir, stack, cpu
        self._first, self._size = first, size
        self._clock = AwakeClock(4 * LOOK_SECONDS, clock)
        self._now: Waiting | None = None
        self._since, self._told = 0.0, False
        self._usual: deque[float] = deque(maxlen=NUM_USUAL)
        self._number = 0

    def is_over(self) -> bool:
        """Whether the run has ended, and its directory has gone."""
        return self._run_dir is not None and not self._run_dir.exists()

    def look(self) -> None:
        """Answer requests, and check whether this rank waits unusually long."""
        found, now = self._read(), self._clock.look()
        if found is None or self._now is None or not found.same(self._now):
            if self._now is not None:
                self._usual.append(now - self._since)
            self._now, self._since, self._told = found, now, False
            return
        waited = now - self._since
        if not self._told and waited > self._most():
            self._told = True
            self._tell(found, waited)

    def _read(self) -> Waiting | None:
        """Answer requests. The current wait, if there is one."""
        with reading() as free:
            return self._read_stack(self._stack() if free else None)

    def _read_stack(self, stack: Stack | None) -> Waiting | None:
        if self._run_dir is not None:
            answer(self._run_dir, self.rank, stack)
        return None if stack is None else wait(stack, self._cpu())

    def _most(self) -> float:
        # Among few waits a single one, such as for another rank's first step, would dominate.
        usual = statistics.median(self._usual) if len(self._usual) >= LEAST_USUAL else 0.0
        return max(LEAST_SECONDS, TIMES_USUAL * usual)

    def _tell(self, found: Waiting, seconds: float) -> None:
        ranks = [self._first + rank for rank in found.ranks or range(self._size)]
        answers = self._asked([rank for rank in ranks if rank != self.rank])
        now = self._read()
        if now is None or not now.same(found):
            return  # it is over
        late = [r for r, said in answers.items() if said.why or said.collective != found.what]
        late = late or list(answers)
        begin = f"rank {self.rank} has waited {seconds:.0f} s in {found.what}"
        begin += f" at {found.line}" if found.line else ""
        if late:
            are = "is" if len(late) == 1 else "are"
            ranks = "rank" if len(late) == 1 else "ranks"
            begin += f": {ranks} {', '.join(map(str, late))} {are} not here yet"
        elsewhere = self._run_dir is None  # ranks of torchrun cannot answer
        said = [] if elsewhere else [answers[rank].said(rank) for rank in late[:_MOST_ASKED]]
        self._say("\n".join([begin, *said]), late)

    def _asked(self, ranks: list[int]) -> dict[int, Answer]:
        if self._run_dir is None:
            return {rank: Answer() for rank in ranks}
        return {rank: ask(self._run_dir, rank) for rank in ranks[:_MOST_ASKED]} | {
            rank: Answer(why="not asked") for rank in ranks[_MOST_ASKED:]
        }

    def _say(self, text: str, late: list[int]) -> None:
        if self._run_dir is None:
            print(text, file=sys.stderr, flush=True)
            return
        self._number += 1  # the launcher prints it: the output of most ranks is not visible
        write_record(self._run_dir, Waited(self.rank, self._number, text, late))


_started: list[int] = []


def watch_waits() -> None:
    """Start the watching thread of this process, once."""
    if os.getpid() in _started:
        return
    _started[:] = [os.getpid()]
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    directory = RUN_DIR.read()
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    clock = time.pthread_getcpuclockid(main_thread)
    made = WaitWatch(
        rank,
        Path(directory) if directory else None,
        lambda: main_stack(main_thread),
        first=rank // size * size,
        size=size,
        cpu=lambda: time.clock_gettime(clock),
    )
    threading.Thread(target=_keep_looking, args=(made,), name="tutti-waits", daemon=True).start()


def _keep_looking(made: WaitWatch) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        try:
            made.look()
        except OSError:
            if made.is_over():
                return
