"""Replicas trace a call anew together: one that traces alone would wait for the others in vain.

replica 0   . . . . . o      waits in a round, and hears that replica 1 traces
replica 1   . . T            tells the others, and waits for the same of them

All replicas make the same calls. So if one has traced its k-th time before its call c, and another has made
more calls with fewer traces, they differ: both end.
"""

from __future__ import annotations

from collections.abc import Sequence

from tutti.errors import CommError
from tutti.replicas.counterparts import LOOK_SECONDS, Counterparts

TRACE, APART = "trace", "apart"
_MOST_LETTERS = 300


class Traces(Counterparts):
    """The traces of one rank and its counterparts in the other replicas, after the first call."""

    def __init__(self, ranks: Sequence[int], replica: int, timeout_seconds: float) -> None:
        super().__init__(ranks, replica, timeout_seconds)
        self._num_calls = self._num_traces = self._step = 0
        # By replica: the number of its traces, of its calls before the last one, and the reason for that.
        self._heard: dict[int, tuple[int, int, str]] = {}
        self._apart: dict[int, str] = {}  # replicas that have gone on without a trace, and where

    def handle(self, replica: int, topic: str) -> None:
        """Handle a letter; the caller holds the post's lock."""
        word, count, calls, text = topic.split(" ", 3)
        if word == TRACE:
            self._heard[replica] = int(count), int(calls), text
        else:
            self._apart[replica] = text

    def begin(self, step: int, why: str) -> None:
        """Trace after this number of steps, together with the remaining others.

        Raises:
            CommError: another one has gone on without a trace, or does not come in time.
        """
        post = self._the_post()
        with post.changed:
            self._num_traces += 1
        self._tell(TRACE, f"{step} {why}")
        until = post.seconds + self._timeout
        while True:
            with post.changed:
                post.check()
                if self._apart:
                    other, at = next(iter(self._apart.items()))
                    raise self._differs(self._replica, f"{step} {why}", other, at)
                heard = {i: x for i, x in self._heard.items() if x[0] >= self._num_traces}
                for i, (_, calls, text) in heard.items():
                    if calls != self._num_calls:
                        raise self._differs(i, text, self._replica, f"{step} {why}")
                missing = [i for i in self._others() if i not in heard]
                if not missing:
                    return
                post.changed.wait(LOOK_SECONDS)
            self.check()
            if post.seconds > until:
                raise CommError(
                    f"replica {missing[0]} did not come to the trace after step {step} within "
                    f"{self._timeout:g} s",
                    why=f"replica {self._replica} traces the step anew: {why}",
                    fix="change the step's options on all replicas; if one is only slow, set TUTTI_TIMEOUT "
                    "to more seconds",
                )

    def call(self, step: int) -> None:
        """Note the call for `step`, after its trace if it has one; see `check`."""
        self._num_calls, self._step = self._num_calls + 1, step
        self.check()

    def check(self) -> None:
        """Raise `CommError` if another replica traces a call that this one has made without a trace."""
        for i, (count, calls, text) in list(self._heard.items()):
            if count > self._num_traces and calls < self._num_calls:
                self._tell(APART, str(self._step))
                self._the_post().flush()
                raise self._differs(i, text, self._replica, str(self._step))

    def _tell(self, word: str, text: str) -> None:
        topic = f"{word} {self._num_traces} {self._num_calls} {text[:_MOST_LETTERS]}"
        for i in self._others():
            self._the_post().send(self._ranks[i], topic)

    def _others(self) -> list[int]:
        post = self._the_post()
        return [
            i for i, rank in enumerate(self._ranks) if i != self._replica and post.is_here(rank)
        ]

    def _differs(self, tracing: int, text: str, other: int, at: str) -> CommError:
        step, _, why = text.partition(" ")
        return CommError(
            f"replicas differ: replica {tracing} traces the step anew after step {step}, and replica "
            f"{other}, at step {at}, has not",
            why=why,
            fix="freeze, unfreeze and change weights and options at the same steps on all replicas, not by "
            "values such as losses, which are each replica's own",
        )
