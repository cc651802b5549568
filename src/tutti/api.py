"""The public functions: `distribute` makes a `Step`, `verify` a `Verdict`, `loader` a `Loader`."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tutti.argument_types import whole_number
from tutti.calls.first_call import refuse_where_apart
from tutti.capture.batch import taken, with_arguments
from tutti.capture.default_device import in_own_default
from tutti.capture.state.models import as_one_module
from tutti.data.arguments import checked_loader, refuse_others
from tutti.data.loader import Loader
from tutti.data.worker_start import WorkerStart
from tutti.distributed_step import Step
from tutti.environment import LAYOUT, PLAN
from tutti.execution.collector import rarely_collected
from tutti.graph.edits.quick import quickly_written
from tutti.job import Job
from tutti.layout import Layout
from tutti.modes.choice import kind_of
from tutti.planning.plan_file import Plan
from tutti.propagate.batch_dim import BatchDim
from tutti.replicas import strategies
from tutti.server.protocol import consistency
from tutti.user_lines import OnlyUsersFrames, users_level
from tutti.verification.verdict import Verdict
from tutti.version import VERSION


@in_own_default
def distribute(
    train_step: Callable[..., Any],
    model: Any,
    optimizer: Any = None,
    layout: str | Layout | None = None,
    *,
    place: Mapping[str, str] | None = None,
    cut: str | Sequence[str] = (),
    batch_dim: BatchDim = None,
    seed: int = 0,
) -> Step:
    """Play `train_step(model, optimizer, *batch)` on many ranks; the result is called with the batch.

    Args:
        train_step: an ordinary step for one device: forward, loss, backward, clipping, update. Without
            an optimizer it is called as `train_step(model, *batch)` (evaluation).
        model: stays unchanged. A module, also compiled or in `DataParallel`; or a dict, list or tuple of
            modules: `{"G": ..., "D": ...}`. Sharded parameters are `DTensor`s after the first call;
            `Step.whole` makes them whole for a block.
        optimizer: a `torch.optim.Optimizer`, a list, tuple or dict of them, or None.
        layout: such as `"data=2 tensor=2 zero=1"`; by default that of `tutti run --layout` or `--plan`,
            else data parallel over all ranks. `"auto"`, perhaps with fixed words: the first call chooses the
            fastest that is predicted to fit these ranks.
        place: compute shardings by parameter-name pattern, one entry per dim:
            `{"*.q_proj.weight": "tensor, -"}`; a pattern of module names shards their outputs, as
            `tutti.shard_as` does. Axes that the layout lacks have no effect.
        cut: names of modules, or patterns, at which the stages of a pipeline begin, one for each stage
            but the first; chosen by predicted cost by default. Ignored without an axis `pipe`.
        batch_dim: the dim of samples of the batch's tensors, for all of them or one entry for each argument
            of the step after the optimizer (a sequence, or a mapping by name), None for one without
            samples; by default dim 0 of those with as many samples as the first, or of others if these
            split more of the step.
        seed: of random ops such as dropout, which do not depend on the layout; an integer of 64 bits, as
            for `torch.manual_seed`.

    Returns:
        A `Step`. Call it with the *global* batch: the same plain tensors on every rank.

    Raises:
        LayoutError: for an invalid layout, or one that cannot work on these ranks.
        TuttiError: for a step that cannot be called so, or a seed that is no integer of 64 bits.
        CaptureError, ShardingError: at the first call, for a step or a batch that does not fit, such as a
            batch without samples.
    """
    plan = None
    if layout is None and optimizer is not None and (path := PLAN.read()):
        plan = _plan_of(Path(path), model)
        place = plan.place if place is None else place
    elif optimizer is not None and (path := PLAN.read()):
        _warn_of_plan(layout, Plan.read(Path(path)))
    if (given := _automatic(layout)) is not None:
        layout = ""
    return Step(
        train_step,
        model,
        optimizer,
        layout_now(layout),
        automatic=given,
        predicted_seconds=None if plan is None else plan.seconds,
        place=place,
        cut=cut,
        batch_dim=batch_dim,
        seed=seed,
        found=None if plan is None else plan.found,
    )


def _plan_of(path: Path, model: Any) -> Plan:
    """The run's plan, which must be for this model."""
    plan = Plan.read(path)
    _, module = as_one_module(lambda *_: None, model)
    plan.check(module, VERSION, int(os.environ.get("WORLD_SIZE", "1")), at=str(path))
    return plan


def _warn_of_plan(layout: str | Layout | None, plan: Plan) -> None:
    """Warn, on the first rank, of a script's own layout that is not the plan's."""
    own = str(layout) if _automatic(layout) is not None else str(layout_now(layout))
    if own != plan.layout and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f'the script gives distribute layout="{own}", so this step does not follow the plan of '
            f'"{plan.layout or "one device"}": leave layout out of distribute, or run without the plan',
            stacklevel=users_level(),
        )


def _automatic(layout: str | Layout | None) -> str | None:
    """The words beside `auto` of a layout; None if it has no such word."""
    words = layout.split() if isinstance(layout, str) else []
    return " ".join(word for word in words if word != "auto") if "auto" in words else None


@in_own_default
def verify(
    train_step: Callable[..., Any],
    model: Any,
    optimizer: Any,
    batch: Sequence[Any] | Mapping[str, Any],
    layout: str | Layout,
    *,
    place: Mapping[str, str] | None = None,
    cut: str | Sequence[str] = (),
    batch_dim: BatchDim = None,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Verdict:
    """Prove that the step under `layout` is the same step, on virtual ranks in this process.

    Two comparisons, over all returned values, every parameter, buffer and optimizer slot after `steps`
    steps: the captured graph against the eager step in the model's own dtypes, and the partitioned
    program against one device with every floating dtype promoted to `dtype`. Model and optimizer stay
    unchanged. Replicas are compared with as many runs on one device, between which the strategy runs on
    whole weights. `batch` holds the arguments of a call: a mapping for `step(**batch)`. `place`, `cut`
    and `batch_dim` are those of `distribute`.

    Returns:
        A `Verdict`: `.ok`, `.max_error`, `.capture_error`, `.first_difference`; prints as a report.

    Raises:
        TuttiError: for `steps` below 1, or what `distribute` refuses.
    """
    options: Any = {"place": place, "cut": cut, "batch_dim": batch_dim, "seed": seed}
    steps = whole_number("steps", steps, 1, fix="steps=2, or another number of steps to compare")
    job = Job.of(train_step, model, optimizer, layout_now(layout), **options)
    given = taken(batch)
    job.refuse_empty(given)
    refuse_where_apart(optimizer, job.layout)
    with rarely_collected(), quickly_written(), OnlyUsersFrames():
        compare = partial(kind_of(job.layout).compare, job, steps=steps, dtype=dtype)
        return with_arguments(compare, job.train_step, job.optimizer, given)


def loader(
    dataset: Any,
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Callable[..., Any] | None = None,
    collate_rows: bool = False,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    worker_init_fn: Callable[[int], None] | None = None,
    timeout: float = 0,
    multiprocessing_context: Any = None,
    weights: Sequence[float] | None = None,
    bucket_by_length: Sequence[int] | None = None,
    length: Callable[[int], int] | Sequence[int] | None = None,
    share_reads: bool | None = None,
    layout: str | Layout | None = None,
    **others: Any,
) -> Loader:
    """Batches of a dataset, of which each rank reads its rows only; a position that any layout resumes.

    The order is a function of seed, epoch and position alone. Ranks divide a batch along `replica` and
    `data`, in blocks; its tensors are then `DTensor`s of the global shape. Every rank reads the whole of a
    batch that does not divide, as plain tensors, and of every batch as a worker of servers. Global random
    numbers (Python's, NumPy's, PyTorch's) are seeded for each sample by seed, epoch and position, so
    random transforms give the same on any rank and worker; for all samples of a batch by the first, in a
    dataset with `__getitems__`. PyTorch's `DataLoader` reads; its arguments have their meaning there.

    Args:
        dataset: with `__len__` and `__getitem__`; or an `IterableDataset`, which each rank reads whole, by
            one worker at most, and which resumes by its `state_dict` or by counting. The same whole dataset
            on every rank.
        batch_size: the number of samples of the global batch.
        shuffle: another permutation each epoch, without a call of `set_epoch`; it takes no memory.
        seed: of the order and of random transforms.
        drop_last: leave out a last batch that is not full.
        num_workers: processes that read, for each rank.
        collate_fn: joins a list of samples. It may look at all samples (padding to the longest), so each
            rank reads the whole batch and keeps its rows of every tensor with a row for each sample.
            Without it samples are stacked, and each rank reads its rows only.
        collate_rows: `collate_fn` makes each row from its sample alone, in every batch in one shape, and
            draws no random numbers: each rank reads its rows only.
        pin_memory: copy batches into page-locked memory.
        prefetch_factor: batches that each worker reads ahead.
        persistent_workers: keep the workers after an epoch.
        worker_init_fn: called with the number of each worker when it starts.
        timeout: seconds to wait for a batch of a worker; 0 waits for ever.
        multiprocessing_context: how workers start, such as `"spawn"`.
        weights: `dataset` is a list of datasets, whose samples take turns by these shares: at no time has one
            of them had a whole sample more or less than its share. An epoch has as many samples as all of
            them together; each dataset goes on through its own passes.
        bucket_by_length: bounds of lengths: each batch has samples of one bucket. What is left in the buckets
            makes the last batches. A `collate_fn` with an argument `length` gets the bound, to pad to it.
        length: of each sample, for the buckets: a function of its number, or a sequence.
        share_reads: ranks of one host that read the same samples take turns: one reads a batch, and the
            others copy it from shared memory. The batches are the same. By default ranks share if there are
            workers and a read takes much longer than the copy; True shares in any case, False never.
            Iterable datasets are not shared.
        layout: as in `distribute`; by default that of `tutti run --layout`, else data parallel over all
            ranks.

    Returns:
        A `Loader`.

    Raises:
        LayoutError: for an invalid layout.
        TuttiError: for arguments that do not fit each other, the dataset or the layout.
        TypeError: for `sampler`, `batch_sampler` and `generator`, which give another order on each rank.
    """
    refuse_others(others, inspect.signature(loader).parameters)
    workers: dict[str, Any] = {
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "prefetch_factor": prefetch_factor,
        "persistent_workers": persistent_workers,
        "worker_init_fn": WorkerStart(worker_init_fn),
        "timeout": timeout,
        "multiprocessing_context": multiprocessing_context,
    }
    return checked_loader(
        dataset,
        batch_size,
        layout_now(layout),
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        collate_fn=collate_fn,
        collate_rows=collate_rows,
        weights=weights,
        bucket_by_length=bucket_by_length,
        length=length,
        share_reads=share_reads,
        workers=workers,
    )


def layout_now(text: str | Layout | None) -> Layout:
    """The given layout, else that of `tutti run --layout`, else data parallel over all ranks."""
    if text is None:
        text = LAYOUT.read() or None
    if text is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        text = f"data={world_size}" if world_size > 1 else ""
    layout = Layout.parse(text)
    layout.check_available()
    if layout.server:
        consistency.parse(layout.sync)
    elif layout.sync:
        strategies.parse(layout.sync).check(layout.num_replicas)
    return layout
