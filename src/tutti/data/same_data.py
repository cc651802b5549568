"""All ranks of a run read the same dataset from the same position, or none starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group
from tutti.errors import TuttiError
from tutti.launch.ranks import ensure_process_group
from tutti.layout import Layout

ONE_DEVICE = Layout()
LOOP = "the start of a loop over tutti.loader"


def met(layout: Layout) -> tuple[Layout, int]:
    """The layout that splits batches in this process, and its rank there.

    One device if nothing else runs: also where a command plays the ranks in this process. Workers of
    servers read whole batches, each for itself.
    """
    if layout.num_ranks == 1 or layout.server or not ensure_process_group():
        return ONE_DEVICE, 0
    layout.check_ranks(dist.get_world_size())
    return layout, dist.get_rank()


def check_same(state: Mapping[str, Any], dataset: str) -> None:
    """Compare what the ranks are about to read; all of them call together.

    Raises `TuttiError` on every rank, with the first entry that differs; `CommError` for a rank that does not
    come.
    """
    group = Group.world()
    found = [json.loads(x) for x in exchange_texts(json.dumps(state), group, LOOP)]
    for name in state:
        texts = [json.dumps(x[name]) for x in found]
        if len(set(texts)) > 1:
            raise _unlike(name, dict(zip(group.ranks, texts, strict=True)), dataset)


def _unlike(name: str, texts: dict[int, str], dataset: str) -> TuttiError:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    said = "\n       ".join(
        f"{'rank' if len(r) == 1 else 'ranks'} {', '.join(map(str, r))}: {text[:60]}"
        for text, r in ranks.items()
    )
    what, fix = _WORDS.get(
        name, (f"the loaders of the ranks differ in {name}", f"one {name} on all ranks")
    )
    return TuttiError(what.format(dataset=dataset), why=said, fix=fix)


_SAME = "the whole dataset on every rank, in one order; the loader gives each rank its rows"
_WORDS = {
    "length": ("ranks have datasets ({dataset}) of different lengths", _SAME),
    "first_samples": ("ranks have different datasets ({dataset}): the first samples differ", _SAME),
    "kind": ("ranks have different kinds of datasets", _SAME),
    "epoch": ("the loaders of the ranks are in different epochs", "load one state on all ranks"),
    "sample": (
        "the loaders of the ranks are at different samples",
        "load one state on all ranks, and leave a loop over the loader at the same batch",
    ),
}
