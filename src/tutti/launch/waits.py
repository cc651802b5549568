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
from tutti.launch.thread_stacks import Stack, frames_of, stack_of
from tutti.launch.whereabouts import Waiting, may_wait, wait

LOOK_SECONDS = 0.5
LEAST_SECONDS, TIMES_USUAL = 10.0, 10.0
LEAST_USUAL, NUM_USUAL = 5, 100
_MOST_ASKED = 4
# Processor seconds of the main thread between two looks: one that waits looks after its peers now and then.
_MOST_COMPUTED = 0.1 * LOOK_SECONDS


class WaitWatch:
    """Watches the waits of one rank.

    Args:
        rank: of the run; `first` is the run's rank of rank 0 of torch.distributed, and `size` the number of
            its ranks.
        run_dir: that of `tutti run`, if it has started this rank: the others answer there.
        stack: the main thread's, as text; `frames` of it as it waits, with its frames.
        cpu: seconds that the main thread has computed.
        clock: seconds without the suspensions of this process.
    """

    def __init__(
        self,
        rank: int,
        run_dir: Path | None,
        stack: Callable[[], Stack],
        *,
        frames: Callable[[], Stack] | None = None,
        first: int = 0,
        size: int = 1,
        cpu: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self._run_dir, self._cpu = rank, run_dir, cpu
        self._stack, self._frames = stack, frames or stack
        self._first, self._size = first, size
        self._clock = AwakeClock(4 * LOOK_SECONDS, clock)
        self._seen: tuple[Stack, float] = [], 0.0  # and the processor time
        self._stands = False  # since the look before
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
            if found is not None and self._now is not None and not self._now.what and self._stands:
                self._now = found  # the wait that the look before could not name
                return
            if self._now is not None:
                self._usual.append(now - self._since)
            self._now, self._since, self._told = found, now, False
            return
        waited = now - self._since
        if not self._told and waited > self._most():
            self._told = True
            self._tell(found, waited)

    def _read(self) -> Waiting | None:
        """The current wait, if there is one; answers requests. The frames end with the call."""
        stack = self._looked_at()
        if self._run_dir is not None:
            answer(self._run_dir, self.rank, stack)
        found = wait(stack, self._cpu())
        if found is None and may_wait(stack):  # a short one, so far: it has no name
            return Waiting(object(), "", "", ())
        return found

    def _looked_at(self) -> Stack:
        """The main thread's stack; with its frames if it has stood in a wait since the last look."""
        seen = self._stack(), self._cpu()
        self._stands = seen[0] == self._seen[0] and seen[1] - self._seen[1] < _MOST_COMPUTED
        self._seen = seen
        return self._frames() if self._stands and may_wait(seen[0]) else seen[0]

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
        lambda: stack_of(main_thread),
        frames=lambda: frames_of(main_thread),
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
