"""A worker's signs of life: a thread sends them, also while the script sleeps or computes.

It notes how long its own waits took: a process that was suspended has had a long one.
"""

from __future__ import annotations

import threading
import time

from tutti.environment import LEASE
from tutti.errors import CommError, ServerError
from tutti.server.protocol import messages as m
from tutti.server.protocol.machine import BEAT_SECONDS
from tutti.server.protocol.session import Session
from tutti.server.wire.connections.links import Links
from tutti.server.wire.connections.run_over import RunOverError
from tutti.server.wire.connections.shortage import ShortError

_IN_A_LEASE = 5  # at least


class Heartbeats:
    """Sent to all servers of a session from `start` to `close`.

    Args:
        links: separate connections, used by the thread alone.
        told: the connections of the worker's requests, which fail once a heartbeat hears that all must.
    """

    def __init__(self, session: Session, links: Links, told: Links) -> None:
        self._session, self._links, self._told = session, links, told
        self._lease_seconds = LEASE.read()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._waits_since: float | None = None
        self.longest_seconds = 0.0

    def start(self) -> None:
        """Send from now on."""
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more."""
        self._ended.set()

    def close(self) -> None:
        """Wait for the end of the thread, and close the connections."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._links.close()

    def silence(self) -> str:
        """That this process was suspended for longer than its lease; "" if it was not."""
        since, now = self._waits_since, time.monotonic()
        longest = max(self.longest_seconds, now - since if since is not None else 0.0)
        if longest < self._lease_seconds:
            return ""
        return (
            "this worker was suspended, or kept Python busy in native code, for "
            f"{longest:.1f} s, longer than its lease of {self._lease_seconds:g} s"
        )

    def _send(self) -> None:
        seconds = min(BEAT_SECONDS, self._lease_seconds / _IN_A_LEASE)
        while not self._waited(seconds):
            beat = m.Beat(worker=self._session.worker, incarnation=self._session.incarnation)
            try:
                self._links.ask(dict.fromkeys(range(self._session.num_servers), beat))
            except (ShortError, RunOverError) as error:
                self._told.fail(error)  # this worker may compute, or wait for another server
            except (CommError, ServerError):
                continue  # other requests report the error

    def _waited(self, seconds: float) -> bool:
        """Wait for the next heartbeat, and note how long that took; whether this is the end."""
        self._waits_since = begin = time.monotonic()
        ended = self._ended.wait(seconds)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - begin)
        self._waits_since = None
        return ended
