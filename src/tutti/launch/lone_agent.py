"""The rendezvous of an agent that is the only one of its run.

One agent has nobody to meet: it is rank 0 of 1, and its store is in its memory. PyTorch's `c10d`
rendezvous would keep a membership alive in a thread, and read the source of every frame of the stack
for each of its events.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "tutti-lone-agent"


class LoneAgent(RendezvousHandler):
    """Meets nobody: no socket, no file.

    Args:
        given: the run's id, and the address that its ranks take for `MASTER_ADDR`.
    """

    def __init__(self, given: RendezvousParameters) -> None:
        self._run_id, self._address = given.run_id, given.local_addr
        self._store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def get_backend(self) -> str:
        """The name in `LaunchConfig.rdzv_backend`."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Rank 0 of 1, at once; with a free port for ranks that use `env://` by themselves."""
        where = RendezvousStoreInfo.build(0, self._store, self._address)
        return RendezvousInfo(self._store, 0, 1, where)

    def is_closed(self) -> bool:
        """Never: there is nobody to close it for."""
        return False

    def set_closed(self) -> None:
        """Nothing waits for it."""

    def num_nodes_waiting(self) -> int:
        """No agent joins later."""
        return 0

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is open."""
        return True


rendezvous_handler_registry.register(BACKEND, LoneAgent)
