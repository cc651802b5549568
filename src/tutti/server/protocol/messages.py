"""The messages of workers and servers. The wire (`frames.py`) writes and reads them.

    worker                        server
    Join         ->  <-           JoinReply
    Pull         ->  <-           Weights     waits for its permit
    Push         ->  <-           Done        once it is durable
    Load         ->  <-           Done
    Sums         ->  <-           Partial     waits until the clock is closed        } only with a coupled
    Settle       ->  <-           Done        the update is made                     } update, several servers
    Add          ->  <-           Total       waits for the others
    Share        ->  <-           Shared      once for a connection within a host
    Beat, Leave  ->  <-           Done
    any          ->  <-           Refused

Every request may come twice, late, or after the worker's death: a server answers alike and acts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutti.server.protocol.update import WEIGHT


@dataclass(frozen=True, eq=False)
class TensorPart:
    """A tensor in a message: `values * scale`, of the rows `rows` (ascending) of its block, or of all."""

    values: Tensor
    scale: float = 1.0
    rows: Tensor | None = None

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The decompressed numbers; the same tensor if it needs no decompression."""
        found = self.values.to(dtype)
        return found if self.scale == 1.0 else found * self.scale


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """The sender: a worker and its incarnation. Observers (worker -1) may only pull."""

    worker: int
    incarnation: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Join(Request):
    """A worker begins, or asks once more. `clock`: the earliest clock to begin with (-1: the server's)."""

    fingerprint: str
    clock: int = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Pull(Request):
    """Asks for the blocks `keys` (or a slot) for the gradient of `clock`; `rows`: only these, by key."""

    clock: int
    keys: tuple[int, ...]
    rows: Mapping[int, Tensor] = field(default_factory=dict)
    slot: str = WEIGHT


@dataclass(frozen=True, kw_only=True, eq=False)
class Push(Request):
    """A worker's gradients for one server, by key.

    sequence: 1, 2, ... within an incarnation.
    version: the number of updates in its weights.
    """

    sequence: int
    clock: int
    version: int
    given: Mapping[str, float]
    parts: Mapping[int, TensorPart]


@dataclass(frozen=True, kw_only=True, eq=False)
class Load(Request):
    """Other values for the state, by key; it has a sequence as a push does, but no clock."""

    sequence: int
    slot: str
    parts: Mapping[int, TensorPart]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums(Request):
    """Asks for the sums of each block over the gradients of a clock."""

    clock: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Settle(Request):
    """The sums of each variable over all servers' blocks: the server can make the update of `clock`."""

    clock: int
    sums: Mapping[str, Tensor]


# In place of a clock: a sum over workers that are at any clocks, once all of them have come.
MEETING = 2**62


@dataclass(frozen=True, kw_only=True, eq=False)
class Add(Request):
    """One worker's part of a small sum (float64, 1-D), or of a `max` or `min`; of a clock, or `MEETING`."""

    clock: int
    name: str
    values: Tensor
    operation: str = "sum"


@dataclass(frozen=True, kw_only=True, eq=False)
class Beat(Request):
    """A heartbeat."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Leave(Request):
    """A worker ends in good order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Status(Request):
    """Asks for figures: version, staleness, members."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Share(Request):
    """Asks for shared memory for this connection; then says that it is `mapped` (1)."""

    mapped: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """The location of the shared memory (`region.py`); 0 bytes if there is none."""

    pid: int
    descriptor: int
    nbytes: int
    word: str


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinReply:
    """The first clock, the number of updates made, and the number of workers present."""

    clock: int
    version: int
    sequence: int
    num_workers: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Done:
    """Done. For a push: its staleness, and the version after it."""

    version: int
    sequence: int = 0
    staleness: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Blocks by key after `version` updates; `numbers` are those of the last one."""

    version: int
    numbers: Mapping[str, float]
    parts: Mapping[int, TensorPart]


@dataclass(frozen=True, kw_only=True, eq=False)
class Partial:
    """The sums of each block, by key; after the update, the sums of each variable that it used."""

    clock: int
    sums: Mapping[int, Tensor]
    settled: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """A small sum over the workers."""

    values: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Figures:
    """A server's statistics: the count of each staleness, and the workers present.

    gone: the workers that have left or are lost, or have not come in time.
    heard: how many requests of each worker have come. meetings: how many are over.
    """

    version: int
    staleness: Mapping[int, int]
    workers: tuple[int, ...]
    gone: tuple[int, ...]
    heard: Mapping[int, int]
    meetings: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Refused:
    """`reason` is one of the words below; `incarnation` and `sequence` are the server's latest.

    fenced: another incarnation has the worker's place, or its lease has ended.  wrong: never send this again.
    short: the server lacks a resource (`text`: descriptors, room for records); it has done nothing.
    over: the server ends, since the run cannot go on (`text`: which worker is lost).
    """

    reason: str
    text: str
    incarnation: int = 0
    sequence: int = 0


FENCED, WRONG, SHORT, OVER = "fenced", "wrong", "short", "over"
Reply = Shared | JoinReply | Done | Weights | Partial | Total | Figures | Refused
