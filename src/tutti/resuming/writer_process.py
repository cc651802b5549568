"""The process that writes the saves of a rank, beside its training: `python -m` this, with its arguments.

It reads a line for each save from its input, writes a line about each to its output, and ends with the end of
its input, as when the rank has died.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import sys
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint.store_ranks import StoreRanks
from tutti.checkpoint.unanimous import error_parts, parts_of
from tutti.errors import TuttiError
from tutti.resuming.rendezvous import Rendezvous
from tutti.resuming.staged_save import StagedSave

# Below the training; the kernel gives it a quarter of a core that it shares with one of its threads.
_NICE = 5
# They end the run, and this process with it: it ignores them. It starts with them blocked.
ENDING = (signal.SIGINT, signal.SIGTERM)


def main(fd: int, rendezvous: Rendezvous, position: int) -> None:
    """Write saves from the memory of `fd` until the input ends."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    torch.set_num_threads(1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    memory = Memory(fd)
    while True:
        said = json.loads(lines.get())
        print(json.dumps(_done(memory, rendezvous, position, **said)), flush=True)


class Memory:
    """The bytes that the rank has made; it may make more between saves."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def now(self) -> Tensor:
        """All of them."""
        nbytes = os.fstat(self._fd).st_size
        if len(self._bytes) != nbytes:
            # No page is mapped before its use, and the kernel unmaps the last mapping with its tensor.
            self._bytes = torch.frombuffer(mmap.mmap(self._fd, nbytes), dtype=torch.uint8)
        return self._bytes


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # also in the middle of a save, which nobody would wait for


def _done(
    memory: Memory, rendezvous: Rendezvous, position: int, number: int, begin: int, nbytes: int
) -> dict[str, Any]:
    """Write save `number`, whose text is at `begin` in the memory; the error, if any, and warnings."""
    ranks = error = None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        what = f"cannot write save {number}"
        try:
            given = memory.now()
            found = StagedSave.of(given[begin : begin + nbytes].numpy().tobytes().decode())
            what, store = found.save.what, rendezvous.store(number)
            ranks = StoreRanks(store, str(number), position, rendezvous.size, rendezvous.seconds)
            found.write(given, ranks)
        except TuttiError as raised:
            error = parts_of(raised)
        except Exception as raised:  # the rank raises it
            error = error_parts(what, raised)
        if ranks is not None:
            ranks.leave()
    return {"error": error, "warnings": [str(one.message) for one in heard]}


if __name__ == "__main__":
    main(int(sys.argv[1]), Rendezvous.of(sys.argv[2]), int(sys.argv[3]))
