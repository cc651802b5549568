"""Ranks of replicas connect only where they know one secret, the user's own included."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tutti.comm.collectives.groups import Groups
from tutti.comm.posts.lines import connect_lines
from tutti.errors import CommError

TIMEOUT = timedelta(seconds=3)


def connects(secrets: list[str | None]) -> str:
    own = secrets[dist.get_rank()]
    before = os.environ.pop("TUTTI_SECRET", None)
    try:
        os.environ |= {} if own is None else {"TUTTI_SECRET": own}
        earlier, later = [(), (1,)] if dist.get_rank() == 0 else [(0,), ()]
        made = connect_lines(earlier, later, Groups({"replica": 2}, timeout=TIMEOUT))
        for one in made.values():
            one.close()
        return f"connected to {list(made)}"
    except CommError as error:
        return str(error)
    finally:
        os.environ.pop("TUTTI_SECRET", None)
        os.environ |= {} if before is None else {"TUTTI_SECRET": before}


@pytest.mark.parametrize("own", [None, "one secret"])
def test_ranks_with_one_secret_connect(ranks: Any, own: str | None) -> None:
    assert ranks.run(connects, [own, own], n=2) == ["connected to [1]", "connected to [0]"]


@pytest.mark.parametrize("other", [None, "another"])
def test_a_rank_with_another_secret_is_refused(ranks: Any, other: str | None) -> None:
    accepting, connecting = ranks.run(connects, ["one secret", other], n=2)
    assert accepting.startswith("ranks 1 did not connect"), accepting
    assert connecting.startswith("cannot connect to rank 0"), connecting
