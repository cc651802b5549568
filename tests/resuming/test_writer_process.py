"""The process that writes saves outlives the signals that end a run."""

from __future__ import annotations

import signal

from tutti.resuming.background_writer import BackgroundWriter
from tutti.resuming.rendezvous import Rendezvous


def test_a_signal_to_all_processes_of_a_rank_does_not_end_one_that_starts() -> None:
    writer = BackgroundWriter(Rendezvous(1, 30.0), 0, -1)
    writer.reserve(8)
    process = writer._started()
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}
    assert process.stdin is not None
    process.stdin.close()  # it ends once it listens
    code = process.wait(60.0)
    writer.close()
    assert code == 0
