"""The arguments of `tutti.loader`, checked before anything starts."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from tutti.argument_types import whole_number
from tutti.data.collation import Collate, Collation
from tutti.data.length_buckets import LengthBuckets, checked_bounds, lengths_of
from tutti.data.loader import Loader
from tutti.data.mixture import Mixture, check_weights
from tutti.data.rank_rows import num_shares
from tutti.data.reading import Reader
from tutti.data.sample_errors import Whereabouts, dataset_name
from tutti.data.sample_order import Order, SampleOrder
from tutti.data.shared_reads import Terms
from tutti.data.streams import StreamOrder, StreamReader
from tutti.errors import TuttiError
from tutti.layout import Layout
from tutti.user_lines import users_level

# Arguments of PyTorch's `DataLoader` that a loader does not take, and the reasons.
_REFUSED = {
    "sampler": "the order is a function of seed, epoch and position, so that every layout resumes it; "
    "shuffle=True, weights= or a dataset in another order",
    "batch_sampler": "each rank reads its rows of batches of batch_size samples; batch_size=, shuffle=, "
    "weights= or bucket_by_length=",
    "generator": "the order is a function of seed, epoch and position; seed=",
}
# Arguments that say how workers work.
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")


def refuse_others(others: dict[str, Any], known: Iterable[str]) -> None:
    """Raise `TypeError` for arguments that a loader does not take; it takes those `known`."""
    for name in others:
        if name in _REFUSED:
            raise TypeError(f"tutti.loader takes no {name}: {_REFUSED[name]} give what it is for")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"tutti.loader got an unexpected keyword argument {name!r}{hint}")


def checked_loader(
    dataset: Any,
    batch_size: int,
    layout: Layout,
    *,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    collate_fn: Collate | None,
    collate_rows: bool,
    weights: Sequence[float] | None,
    bucket_by_length: Sequence[int] | None,
    length: Any,
    share_reads: bool | None,
    workers: dict[str, Any],
) -> Loader:
    """The loader of these arguments; raises `TuttiError` for those that do not fit."""
    batch_size = whole_number("batch_size", batch_size, 1)
    workers["num_workers"] = whole_number("num_workers", workers["num_workers"], 0)
    seed = whole_number("seed", seed)
    _check_workers(workers)
    if weights is not None:
        check_weights(dataset, weights)
    if collate_rows and collate_fn is None:
        raise TuttiError(
            "collate_rows=True says something of a collate_fn, but there is none",
            fix="leave collate_rows out: without collate_fn each rank joins its own rows",
        )
    if length is not None and bucket_by_length is None:
        raise TuttiError(
            "length= is that of buckets", fix="bucket_by_length=[64, 128], or no length="
        )
    if share_reads not in (None, True, False):
        raise TuttiError(
            f"share_reads={share_reads!r} is no truth value",
            fix="True or False, or None: the measured cost decides",
        )
    bounds = None if bucket_by_length is None else checked_bounds(bucket_by_length)
    by_rows = collate_rows or (collate_fn is None and bounds is None)
    collation = Collation(collate_fn, by_rows=by_rows)
    identity = {
        "seed": seed,
        "batch_size": batch_size,
        "shuffle": bool(shuffle),
        "drop_last": bool(drop_last),
        "weights": None if weights is None else [float(w) for w in weights],
        "bucket_by_length": bounds,
    }
    how: dict[str, Any] = {"shuffle": bool(shuffle), "seed": seed, "drop_last": bool(drop_last)}
    if isinstance(dataset, IterableDataset):
        _check_stream(dataset, layout, batch_size, bounds, shuffle, drop_last)
        _check_unshared(dataset, share_reads)
        workers |= {"num_workers": _at_most_one(workers["num_workers"])}
        reader, order = _streamed(dataset, collation, batch_size, workers, drop_last=drop_last)
        identity |= {"kind": f"stream ({dataset_name(dataset)})", "length": None}
    else:
        datasets, sizes, order = _ordered(dataset, batch_size, weights, bounds, length, how)
        _check_batches(order, batch_size, layout, sum(sizes), drop_last=drop_last)
        reader = Reader(datasets, collation, Whereabouts(workers["num_workers"]))
        kind = "dataset" if weights is None else f"mixture of {len(datasets)} datasets"
        identity |= {"kind": kind, "length": sizes[0] if weights is None else sizes}
    shares = num_shares(layout)
    terms = Terms(
        share_reads,
        by_rows=by_rows,
        batch_size=batch_size,
        odd=any(size % shares for size in (batch_size, *order.odd_sizes())),
        workers=workers["num_workers"] > 0,
        pin=bool(workers["pin_memory"]) and torch.cuda.is_available(),
    )
    return Loader(reader, order, layout, seed=seed, identity=identity, workers=workers, terms=terms)


def _ordered(
    dataset: Any,
    batch_size: int,
    weights: Sequence[float] | None,
    bounds: list[int] | None,
    length: Any,
    how: dict[str, Any],
) -> tuple[list[Any], list[int], Order]:
    """The datasets, their lengths, and the order of their samples."""
    if weights is None:
        size = _length(dataset)
        if bounds is None:
            return [dataset], [size], SampleOrder(size, batch_size, **how)
        lengths = lengths_of(length, size, bounds)
        return [dataset], [size], LengthBuckets(lengths, bounds, batch_size, **how)
    if bounds is not None:
        raise TuttiError(
            "bucket_by_length= and weights= do not go together",
            why="a batch of one bucket would change the shares of the datasets",
            fix="one of them",
        )
    sizes = [_length(x) for x in dataset]
    if 0 in sizes:
        raise TuttiError(
            f"{dataset_name(dataset[sizes.index(0)], sizes.index(0))} has no samples",
            fix="datasets of one sample at least",
        )
    return list(dataset), sizes, Mixture(sizes, weights, batch_size, **how)


def _streamed(
    stream: Any, collation: Collation, batch_size: int, workers: dict[str, Any], *, drop_last: bool
) -> tuple[StreamReader, StreamOrder]:
    whereabouts = Whereabouts(workers["num_workers"])
    reader = StreamReader(
        stream, collation, whereabouts, batch_size=batch_size, drop_last=drop_last
    )
    return reader, StreamOrder(batch_size)


def _at_most_one(num_workers: int) -> int:
    if num_workers > 1:
        warnings.warn(
            f"num_workers={num_workers}, but one worker reads an iterable dataset: several would "
            "read it in another order",
            stacklevel=users_level(),
        )
    return min(1, num_workers)


def _check_stream(
    stream: Any,
    layout: Layout,
    batch_size: int,
    bounds: Any,
    shuffle: bool,
    drop_last: bool,
) -> None:
    name = dataset_name(stream)
    if bounds is not None:
        raise TuttiError(
            f"bucket_by_length=, but {name} is an iterable dataset",
            why="a stream has no samples by number, only its own order",
            fix="a stream of such batches with batch_size=1, or a dataset with __len__",
        )
    if shuffle:
        raise TuttiError(
            f"shuffle=True, but {name} is an iterable dataset",
            why="a stream has no samples by number, only its own order",
            fix="a stream that shuffles itself, or a dataset with __len__ and __getitem__",
        )
    order = StreamOrder(batch_size)
    _check_shares(batch_size, layout, drop_last=drop_last)
    if not layout.server and layout.num_replicas > 1:
        _check_replicas(order, batch_size, layout)
        if not drop_last:
            raise TuttiError(
                f"the last batch of {name} may not divide by replica={layout.num_replicas}",
                why="a stream does not tell its length",
                fix="drop_last=True",
            )


def _check_unshared(stream: Any, share_reads: bool | None) -> None:
    if share_reads:
        raise TuttiError(
            f"share_reads=True, but {dataset_name(stream)} is an iterable dataset",
            why="a rank that reads only some batches of a stream would still pass over all its samples",
            fix="leave share_reads out, or a dataset with __len__ and __getitem__",
        )


def _check_workers(workers: dict[str, Any]) -> None:
    """Refuse options of workers without workers, and values that no worker can have."""
    given = {k: workers[k] for k in _OF_WORKERS if workers[k]}
    if given and not workers["num_workers"]:
        name, value = next(iter(given.items()))
        raise TuttiError(
            f"{name}={value!r} is an option of workers, and num_workers is 0",
            fix=f"num_workers=2, or no {name}=",
        )
    if workers["prefetch_factor"] is not None:
        whole_number("prefetch_factor", workers["prefetch_factor"], 1)
    timeout = workers["timeout"]
    if not isinstance(timeout, int | float) or timeout < 0:
        raise TuttiError(
            f"timeout={timeout!r} is no time in seconds", fix="timeout=0, which waits for ever"
        )


def _length(dataset: Any) -> int:
    name = dataset_name(dataset)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        lacks = "__getitem__" if hasattr(dataset, "__len__") else "__len__"
        raise TuttiError(
            f"the dataset, a {name}, has no {lacks}",
            why="a rank reads its rows by their numbers, in an order over all of them",
            fix="a dataset with __len__ and __getitem__, such as torch.utils.data.Dataset",
        )
    return len(dataset)


def _check_batches(
    order: Order, batch_size: int, layout: Layout, size: int, *, drop_last: bool
) -> None:
    if size == 0:
        raise TuttiError("the dataset has no samples", fix="a dataset of one sample at least")
    if not order.num_batches():
        few = f"the dataset has {size} samples, fewer than batch_size={batch_size}"
        raise TuttiError(
            few if size < batch_size else f"no bucket has batch_size={batch_size} samples",
            why="drop_last=True leaves out a batch that is not full, so there is none",
            fix=f"batch_size={min(size, batch_size - 1)} or less, or drop_last=False",
        )
    _check_shares(batch_size, layout, drop_last=drop_last)
    if not layout.server and layout.num_replicas > 1:
        _check_replicas(order, batch_size, layout)


def _check_shares(batch_size: int, layout: Layout, *, drop_last: bool) -> None:
    shares = num_shares(layout)
    if batch_size < shares and drop_last:
        raise TuttiError(
            f'batch_size={batch_size} gives some ranks of layout "{layout}" no sample',
            why=f"replica and data divide a batch by {shares}",
            fix=f"batch_size={shares} or a multiple",
        )


def _check_replicas(order: Order, batch_size: int, layout: Layout) -> None:
    """Replicas cannot compute a batch together, so each batch must divide by them."""
    num = layout.num_replicas
    why = f'each replica of layout "{layout}" trains on its rows of every batch'
    if batch_size % num:
        raise TuttiError(
            f"batch_size={batch_size} does not divide by replica={num}",
            why=why,
            fix=f"batch_size={-(-batch_size // num) * num}",
        )
    for odd in sorted(order.odd_sizes()):
        if odd % num:
            raise TuttiError(
                f"the last batch has {odd} samples, which do not divide by replica={num}",
                why=why,
                fix="drop_last=True",
            )
