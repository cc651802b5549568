"""Batches of a dataset, each rank's rows of them, and the position in the run: `Loader`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import tee
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tutti.capture.forms import flattened
from tutti.comm.host.segment import SharedMemoryError
from tutti.data.batch_frames import NotSendable
from tutti.data.batch_shards import ShardedBatches, batch_mesh
from tutti.data.cursor import Cursor, as_state, between_batches, check_plain, of_state
from tutti.data.fingerprint import NUM_SAMPLES, FirstSamples, row_of
from tutti.data.own_reads import OwnReads
from tutti.data.permutation import key_of
from tutti.data.rank_rows import is_split, num_shares
from tutti.data.read_turns import Turn, turns
from tutti.data.reading import BatchRequest, Fingerprint, Here, Reader
from tutti.data.same_data import ONE_DEVICE, check_same, met
from tutti.data.sample_errors import dataset_name, leaf_names, of_worker
from tutti.data.sample_order import BatchSpan, Order
from tutti.data.shared_reads import SharedReads, Terms, shared_reads, warn_apart
from tutti.data.streams import StreamReader
from tutti.data.worker_deaths import started, told_of_deaths
from tutti.errors import TuttiError
from tutti.layout import Layout
from tutti.torch_private.pytrees import tree_unflatten

# What to do in place of what a `DataLoader` with a `DistributedSampler` has.
_SHUFFLES = ": shuffle=True makes another permutation each epoch by itself, on all ranks alike; leave {} out"
_INSTEAD = {
    "sampler": _SHUFFLES.format("loader.sampler.set_epoch(epoch)"),
    "batch_sampler": _SHUFFLES.format("loader.batch_sampler"),
    "set_epoch": _SHUFFLES.format("loader.set_epoch(epoch)"),
}


class Loader:
    """Batches of a dataset; of each, every rank reads its rows. Made by `tutti.loader`.

    A loop over it is one epoch, from the position on; the next loop goes on with the next epoch. A batch is
    what one device would get: plain tensors, or `DTensor`s of the global shape where ranks divide it.
    """

    def __init__(
        self,
        reader: Reader | StreamReader,
        order: Order,
        layout: Layout,
        *,
        seed: int,
        identity: Mapping[str, Any],
        workers: Mapping[str, Any],
        terms: Terms,
    ) -> None:
        self.layout, self.seed = layout, seed
        self._reader, self._order, self._identity = reader, order, dict(identity)
        self._workers, self._terms = dict(workers), terms
        self._cursor = Cursor()
        self._loop = object()
        self._here, self._rank = ONE_DEVICE, 0
        self._met = False
        self._sharded: ShardedBatches | None = None
        self._shared: SharedReads | None = None
        self._requests = _Requests()
        self._torch = self._data_loader(self._requests)

    @property
    def dataset(self) -> Any:
        """The dataset; a list of several."""
        found = self._reader.datasets
        return found[0] if len(found) == 1 else list(found)

    @property
    def batch_size(self) -> int:
        """The number of samples of the global batch."""
        return self._identity["batch_size"]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"a tutti.Loader has no {name}{_INSTEAD.get(name, '')}")

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; within a loop and just after its last batch, that of the loop."""
        return self._cursor.epoch

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return self._order.num_batches()

    def __iter__(self) -> Iterator[Any]:
        """The batches from the position on, to the end of the epoch.

        Raises:
            TuttiError: a sample that cannot be read or joined with the others, a worker that died, ranks
                with different datasets or positions.
        """
        loop = self._loop = object()
        self._begin()
        left, own = self._planned()
        while True:
            if self._loop is not loop:
                del own
                raise _overtaken()
            turn = None if self._cursor.ended else next(left, None)
            answer = None if turn is None else self._answer(turn, own)
            if turn is None or answer is None:
                break
            if isinstance(answer, str):
                self._part(answer)
                left, own = self._planned()
                continue
            batch, self._cursor = self._taken(answer, turn.span)
            yield batch
        self._cursor = Cursor(self._cursor.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """The position: numbers, texts, lists and dicts, as JSON takes them; the same on every rank.

        In a loop it is the position after the batch that the loop received last: a loader that loads it
        goes on with the next one, under any layout and number of workers.
        """
        if self._cursor.stream is not None:
            check_plain(self._cursor.stream, dataset_name(self.dataset))
        return as_state(self._cursor, self._known)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position. Raises `CheckpointError` for that of another dataset, order or batch size."""
        cursor = of_state(state, self._known)
        if not self._order.allows(cursor.epoch, cursor.sample, ended=cursor.ended):
            raise between_batches(cursor.sample, self._identity["batch_size"])
        if cursor.stream is not None:
            self._reader.check_state()
        self._loop = object()
        self._cursor = Cursor(cursor.epoch + 1) if cursor.ended else cursor

    @cached_property
    def _known(self) -> dict[str, Any]:
        """The identity of order and dataset, of which the first samples are read here."""
        return self._identity | {"first_samples": self._seen.digest}

    @cached_property
    def _seen(self) -> FirstSamples:
        """The first samples: read by a worker, if there are workers, since a dataset may open its files
        at the first read, and workers must not inherit them."""
        if self._reader.seen is not None:
            return self._reader.seen
        return self._alone(Fingerprint(NUM_SAMPLES), pin=False)["found"]

    def _alone(self, request: Any, *, pin: bool) -> dict[str, Any]:
        """The answer to one request, by a worker that ends after it, if there are workers."""
        one = {k: v for k, v in self._workers.items() if k != "prefetch_factor"}
        one |= {"persistent_workers": False, "num_workers": min(1, one["num_workers"])}
        one["pin_memory"] &= pin
        answer = OwnReads(started(self._data_loader([request], one)), self._reader).next()
        assert answer is not None
        return _whole(answer)

    def _data_loader(self, requests: Any, workers: Mapping[str, Any] | None = None) -> DataLoader:
        generator = torch.Generator().manual_seed(key_of("workers", self.seed))
        return DataLoader(
            self._reader,  # pyright: ignore[reportArgumentType]
            batch_sampler=requests,
            collate_fn=_unchanged,
            generator=generator,
            **(self._workers if workers is None else workers),
        )

    def _begin(self) -> None:
        """Before a loop: begin the next epoch after the end of one, meet the other ranks."""
        if self._cursor.ended:
            self._cursor = Cursor(self._cursor.epoch + 1)
        self._here, self._rank = met(self.layout)
        if self._here.num_ranks > 1 and (not self._met or self._here.num_replicas == 1):
            # Replicas wait for each other once only: later one may be ahead, or lost.
            check_same(self.state_dict(), dataset_name(self._reader.datasets[0]))
            if not self._met:
                here = Here(self._here, self._rank, self.seed)
                self._shared = shared_reads(here, self._terms, self._seen.cost)
            self._met = True
        if num_shares(self._here) > 1 and self._sharded is None:
            self._sharded = ShardedBatches(self._here)
            batch_mesh(self._here)
        if self._shared is not None:
            self._shared.begin({"epoch": self._cursor.epoch, "sample": self._cursor.sample})

    def _planned(self) -> tuple[Iterator[Turn], OwnReads]:
        """The turns from the position on, and this rank's reads for them, in their order."""
        begin, here = self._cursor, Here(self._here, self._rank, self.seed)
        spans = self._order.spans(begin.epoch, begin.sample)
        group_of = _no_group if self._shared is None else self._shared.group
        ours, readers = tee(turns(spans, group_of))
        # No cycle: a loader that a program drops ends its workers then, not at the next collection.
        request = self._request = partial(_request_of, self._reader, self._order, begin, here)
        self._requests.begin(request(x) for turn in readers for x in turn.reads)
        return ours, OwnReads(started(self._torch), self._reader)

    def _answer(self, turn: Turn, own: OwnReads) -> dict[str, Any] | str | None:
        """The batch of a turn; None at the end, or why ranks cannot share the batch."""
        answer = None
        for read in turn.reads:
            answer = own.next()
            self._renew(own)
            if read.group is not None:
                assert self._shared is not None and answer is not None
                self._shared.publish(read, answer)
        if turn.group is not None:
            answer = self._given(turn, own)
        return answer if answer is None or isinstance(answer, str) else _whole(answer)

    def _given(self, turn: Turn, own: OwnReads) -> dict[str, Any] | str:
        """The batch of a turn that ranks share."""
        assert self._shared is not None
        while True:
            try:
                with told_of_deaths():
                    return self._shared.take(turn)
            except (NotSendable, SharedMemoryError):  # this rank alone cannot take it
                return self._alone(self._request(replace(turn, group=None)), pin=True)
            except RuntimeError as error:
                if not of_worker(error):
                    raise
                own.fail(error)  # all ranks learn of it at the turn of its batch
                self._renew(own)

    def _renew(self, own: OwnReads) -> None:
        """Persistent workers begin anew after the loss of one."""
        if own.lost:
            self._torch = self._data_loader(self._requests)

    def _part(self, problem: str) -> None:
        """From now on this rank reads for itself, as all ranks do that shared the batch."""
        if self._terms.share:
            warn_apart(problem)
        self._shared = None

    def _taken(self, answer: dict[str, Any], span: BatchSpan) -> tuple[Any, Cursor]:
        """The batch of an answer, and the position after it."""
        epoch, batch = self._cursor.epoch, answer["batch"]
        if "size" in answer:  # of a stream, which alone knows its end
            size = answer["size"]
            after = Cursor(epoch, span.start + size, answer["ended"], answer["stream"])
        else:
            size = span.stop - span.start
            after = Cursor(epoch, span.stop, self._order.span(epoch, span.stop) is None)
        if is_split(size, self._here):
            batch = self._divided(batch, answer["marks"], span, size)
        return batch, after

    def _divided(self, batch: Any, marks: list[bool] | None, span: BatchSpan, num_rows: int) -> Any:
        """The rows of this rank as `DTensor`s of the whole batch of `num_rows`: a stream's last is short."""
        assert self._sharded is not None
        leaves, form = flattened(batch)
        if marks is None:
            self._check_rows(batch, leaves, span, num_rows // num_shares(self._here))
        wrapped = [
            self._sharded.of(x, num_rows) if marks is None or mark else x
            for x, mark in zip(leaves, marks or leaves, strict=True)
        ]
        return tree_unflatten(wrapped, form)

    def _check_rows(self, batch: Any, leaves: list[Any], span: BatchSpan, num_own: int) -> None:
        """Refuse what may differ between ranks that read different rows."""
        for i, x in enumerate(leaves):
            if not isinstance(x, Tensor) or not x.ndim or len(x) != num_own:
                raise _not_by_rows(list(leaf_names(batch))[i], x, self._reader.collation.stacks)
        known = self._seen.rows if self._reader.collation.stacks else None
        if known is not None and (found := tuple(map(row_of, leaves))) != known:
            pairs = zip(leaf_names(batch), found, known, strict=False)
            name, ours, first = next((p for p in pairs if p[1] != p[2]), ("batch", found, known))
            request = self._request(Turn(span))
            raise _another_shape(name, ours, first, self._reader, request)


class _Requests:
    """The batch sampler of PyTorch's `DataLoader`: the requests of the loop that began last."""

    def __init__(self) -> None:
        self._source: Iterator[Any] = iter(())

    def begin(self, source: Iterator[Any]) -> None:
        """Give the requests of a new loop."""
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self._source


def _request_of(reader: Any, order: Order, begin: Cursor, here: Here, turn: Turn) -> Any:
    """The request for the batch of a turn, in a loop that began at a position."""
    request: Any = reader.request(order, begin, turn.span, here)
    # A batch that other ranks cut, too, goes to them whole.
    return request if turn.group is None else replace(request, cuts=False)


def _no_group(_span: BatchSpan) -> None:
    return None


def _whole(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer with a batch; raises the error of one without."""
    if "failure" in answer:
        answer["failure"].throw()
    return answer


def _unchanged(answer: Any) -> Any:
    return answer


def _overtaken() -> TuttiError:
    return TuttiError(
        "this loop over the loader goes on after another one began, or a state was loaded",
        why="a loader has one position",
        fix="one loader for each loop",
    )


_BY_RANK = "each rank reads its own rows only, and {} would differ between ranks"
_WHOLE = "collate_fn=torch.utils.data.default_collate, with which every rank reads the whole batch"


def _not_by_rows(name: str, x: Any, stacks: bool) -> TuttiError:
    if isinstance(x, Tensor):
        kind = f"a tensor of shape {tuple(x.shape)}, without a row for each sample"
    else:
        kind = f"a {type(x).__name__}"
    return TuttiError(
        f"{name} is {kind}",
        why=_BY_RANK.format("it"),
        fix=f"leave it out, or {_WHOLE}" if stacks else "leave it out, or collate_rows=False",
    )


def _another_shape(
    name: str, ours: Any, first: Any, reader: Reader | StreamReader, request: BatchRequest
) -> TuttiError:
    number = int(request.samples.numbers[0])
    dataset = 0 if request.samples.datasets is None else int(request.samples.datasets[0])
    return TuttiError(
        f"{name} has rows {_row(ours)} from {reader.name(dataset, number)} on, "
        f"but {_row(first)} from {reader.name(0, 0)}",
        why=_BY_RANK.format("shapes") + "; without collate_fn the samples are stacked",
        fix=f"samples of one shape and dtype, or {_WHOLE}",
    )


def _row(row: Any) -> str:
    return f"of shape {row[0]} and {row[1]}" if row and isinstance(row[1], str) else f"of {row}"
