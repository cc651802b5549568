"""The table rows that a virtual worker's step reads, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.server.protocol.virtual_servers import Gradients
from tutti.server.split.sparse_tables import PLACES, ROWS
from tutti.server.split.worker_part import WorkerPart


@dataclass(frozen=True)
class RowsRead:
    """The rows of tables that a worker's step reads: as inputs, and their numbers by table."""

    part: WorkerPart
    feed: dict[str, Tensor]
    rows: dict[str, Tensor]

    def pushed(self, gradients: Mapping[str, Tensor]) -> Gradients:
        """The gradients to push: of tables by rows."""
        found: dict[str, Any] = dict(gradients)
        for lookup in self.part.lookups:
            name = lookup.table
            found[name] = lookup.pushed(self.rows[name], gradients[name])
        return found


def rows_read(part: WorkerPart, held: Mapping[str, Tensor], feed: Mapping[str, Any]) -> RowsRead:
    """The rows of the tables in `held` that a step with `feed` reads."""
    found = RowsRead(part, {}, {})
    for lookup in part.lookups:
        table = held[lookup.table]
        rows, places = lookup.unique(dict(feed))
        values = lookup.room(table)
        values[: len(rows)] = table[rows]
        found.feed.update({ROWS + lookup.table: values, PLACES + lookup.table: places})
        found.rows[lookup.table] = rows
    return found
