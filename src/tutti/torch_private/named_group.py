"""A new process group with a name of the caller's choice."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from torch.distributed import ProcessGroup, distributed_c10d


def named_group(
    ranks: Sequence[int], name: str, timeout: timedelta, backend: str | None = None
) -> ProcessGroup:
    """`torch.distributed.new_group` of ascending `ranks`, which alone call it; `name` is new in this process.

    Why: ranks meet under the name of their group. `new_group` makes it of a count, which differs where a rank
    is in more groups than another one, and is the same for groups that different ranks make at once.
    Public: none.
    """
    world, whole = distributed_c10d._world, distributed_c10d._get_default_group()
    usual, store = world.pg_map[whole]
    made: tuple[Any, Any] = distributed_c10d._new_process_group_helper(
        len(ranks),
        [*ranks].index(whole.rank()),
        [*ranks],
        distributed_c10d.Backend(backend or usual),
        store,
        cast("Any", name),
        timeout=timeout,
    )
    world.pg_group_ranks[made[0]] = {rank: i for i, rank in enumerate(ranks)}
    return made[0]
