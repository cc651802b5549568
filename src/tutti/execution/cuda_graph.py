"""A step on one GPU as one CUDA graph: records its kernels once and replays them by one launch.

A recording keeps the addresses of its kernels' operands, and Python's numbers of that call. So the step
overwrites state in place, copies a batch to the addresses of the recording, and copies its results out. A
learning rate that only fused updates read is a tensor; after a change of another number, or a move of state,
the step is recorded anew.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tutti.environment import CUDA_GRAPH
from tutti.graph.ops import collectives
from tutti.graph.ops.expert_rows import PRODUCTS
from tutti.graph.ops.fused_updates import KERNELS
from tutti.graph.ops.loop import graphs_of
from tutti.graph.randomness.draw import draw
from tutti.partition.partition import Program
from tutti.user_lines import users_level

# First calls that run op by op: libraries initialize themselves at their first use.
NUM_WARM_UP = 2
MOST_RECORDINGS = 8

Function = Callable[[list[Any], Callable[[int], int]], tuple[list[Any], list[Any]]]
# Records the kernels of a call on a device; returns a function that replays them, and the call's result.
Recorder = Callable[[Callable[[], Any], torch.device], tuple[Callable[[], None], Any]]

# Ops that make or take a Python number, which a recording would keep.
_ON_HOST: dict[Any, str] = {
    draw: "draws random numbers",
    collectives.draw_part: "draws random numbers",
    torch.ops.aten._local_scalar_dense.default: "reads a value of a tensor",
    **dict.fromkeys(PRODUCTS, "counts the rows of each expert"),
}
_BY_OPS: ContextVar[bool] = ContextVar("by_ops", default=False)


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Context without replays: the steps' ops allocate, and so can be measured."""
    token = _BY_OPS.set(True)
    try:
        yield
    finally:
        _BY_OPS.reset(token)


# One stream for each GPU: libraries keep a workspace for every stream.
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def on_gpu(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """A `Recorder` for a GPU: records the kernels of `call` without running them."""
    graph = torch.cuda.CUDAGraph()
    # A stream is of one GPU, which need not be the current one.
    with torch.cuda.device(device):
        stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))
        before = torch.cuda.current_stream(device)
        try:
            # Other threads, such as data loaders, may allocate meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = call()
        finally:
            torch.cuda.set_stream(before)  # after a failed recording PyTorch leaves its own
    return graph.replay, result


@contextlib.contextmanager
def waits_on_gpu() -> Iterator[list[str]]:
    """Context that collects PyTorch's messages about ops that wait for the GPU; complete at its end."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for one in caught:
        if "called a synchronizing" in str(one.message):
            found.append(str(one.message))
        elif "Synchronization debug mode" not in str(one.message):  # says that the mode is new
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


# The detector of waits, by the kind of device.
WATCHES: dict[str, Callable[[], contextlib.AbstractContextManager[list[str]]]] = {
    "cuda": waits_on_gpu
}
RECORDERS: dict[str, Recorder] = {"cuda": on_gpu}  # by the kind of device


def asked_for() -> bool:
    """Whether the user has enabled recording."""
    return CUDA_GRAPH.read()


def obstacle(
    program: Program, graph: fx.Graph, donated: frozenset[str], device: torch.device
) -> str:
    """The reason why a program with this `graph` cannot be recorded; empty if it can."""
    if device.type not in RECORDERS:
        return f"its model lies on {device.type}"
    if program.layout.mesh.num_ranks > 1:
        return "it runs on several ranks"
    for node in (n for one in graphs_of(graph) for n in one.nodes):
        if node.target in _ON_HOST:
            at = os.path.basename(node.meta.get("source") or "an unknown line")
            return f"it {_ON_HOST[node.target]} at {at}"
    for name, node in program.captured.placeholders.items():
        val = node.meta["val"]
        if isinstance(val, Tensor) and val.device.type != device.type:
            return f'"{name}" lies on {val.device.type}'
    for one in graphs_of(graph):
        for node in (n for n in one.nodes if n.op == "get_attr"):
            val = node.meta.get("val")
            if isinstance(val, Tensor) and val.device.type != device.type and val.dim():
                return f"a constant of shape {list(val.shape)} lies on {val.device.type}"
    kept = [name for name in program.captured.updated if name not in donated]
    if kept and program.captured.reads:
        at = os.path.basename(program.captured.reads.source or "an unknown line")
        return f"it branches on a value of a tensor at {at}"
    if kept:
        return f'"{kept[0]}" shares memory with other state'
    return ""


@dataclass
class _Recording:
    replay: Callable[[], None]
    returned: list[Any]
    batch: list[Tensor]
    rates: list[Tensor]
    rates_now: list[float]
    frozen: list[float]
    places: list[Any]


class CudaGraph:
    """Replaces the function of a program: records its third call and replays it from then on."""

    def __init__(
        self, program: Program, graph: fx.Graph, function: Function, device: torch.device
    ) -> None:
        self._function, self._device = function, device
        captured = program.captured
        names, kinds = captured.inputs, captured.kinds
        is_number = [kinds[n] in ("hyper", "number") for n in names]
        is_batch = [kinds[n] == "batch" for n in names]
        rates = tensor_rates(graph, len(names))
        self._rates = [k for k, number in enumerate(is_number) if number and k in rates]
        self._frozen = [k for k, number in enumerate(is_number) if number and k not in rates]
        self._batch = [k for k, batch in enumerate(is_batch) if batch]
        fed = {*self._rates, *self._frozen, *self._batch}
        self._state = [k for k in range(len(names)) if k not in fed]
        self._names = names
        self._updated = [names.index(n) for n in captured.updated]
        self._recording: _Recording | None = None
        self._num_calls = self.num_recordings = 0
        self._given_up = False

    def __call__(self, inputs: list[Any], key: Callable[[int], int]) -> tuple[list[Any], list[Any]]:
        """(returned leaves, new state values); `inputs` is emptied."""
        self._num_calls += 1
        if self._num_calls == NUM_WARM_UP:
            return self._watched(inputs, key)
        if self._given_up or self._num_calls < NUM_WARM_UP or _BY_OPS.get():
            return self._function(inputs, key)
        recording = self._recording
        if recording is None:
            recording = self._recorded(inputs, key)
        elif why := self._misfit(recording, inputs):
            recording = self._recording = None  # frees its memory for the next one
            recording = self._recorded(inputs, key, why)
        if recording is None:
            return self._function(inputs, key)
        self._feed(recording, inputs)
        recording.replay()
        returned = [x.clone() if isinstance(x, Tensor) else x for x in recording.returned]
        updates = [inputs[k] for k in self._updated]
        inputs.clear()
        return returned, updates

    def _watched(self, inputs: list[Any], key: Callable[[int], int]) -> tuple[list[Any], list[Any]]:
        """A call op by op that checks for obstacles: a failed recording cannot be undone."""
        watch = WATCHES.get(self._device.type, _nothing_to_watch)
        with watch() as waits:
            result = self._function(inputs, key)
        if waits:
            self._give_up(f"an op waits for the GPU: {waits[0]}")
        return result

    def _misfit(self, recording: _Recording, inputs: Sequence[Any]) -> str:
        """The reason why a recording is no longer valid; empty if it is."""
        for k, value in zip(self._frozen, recording.frozen, strict=True):
            if inputs[k] != value:
                return f"{self._names[k]} keeps changing"
        return "" if self._places(inputs) == recording.places else "its state keeps moving"

    def _places(self, inputs: Sequence[Any]) -> list[Any]:
        """The address of each state tensor."""
        return [(inputs[k].data_ptr(), inputs[k].stride()) for k in self._state]

    def _feed(self, recording: _Recording, inputs: Sequence[Any]) -> None:
        for own, k in zip(recording.batch, self._batch, strict=True):
            own.copy_(inputs[k], non_blocking=True)
        rates = [inputs[k] for k in self._rates]
        if rates != recording.rates_now:
            for own, rate in zip(recording.rates, rates, strict=True):
                own.fill_(rate)
            recording.rates_now = rates

    def _recorded(
        self, inputs: list[Any], key: Callable[[int], int], why: str = ""
    ) -> _Recording | None:
        """A new recording for inputs like these, for a reason; None, now and from then on, if the program
        gives up recording."""
        if self.num_recordings == MOST_RECORDINGS:
            return self._give_up(why)
        self.num_recordings += 1
        batch = [torch.empty_like(inputs[k]).copy_(inputs[k]) for k in self._batch]
        rates = [torch.tensor(inputs[k], device=self._device) for k in self._rates]
        given = list(inputs)
        for k, own in zip([*self._batch, *self._rates], [*batch, *rates], strict=True):
            given[k] = own

        def play() -> list[Any]:
            returned, updates = self._function(given, key)
            # The new value of one tensor may be the old value of another.
            elsewhere = [
                (inputs[k], new.clone())
                for k, new in zip(self._updated, updates, strict=True)
                if new is not inputs[k]
            ]
            for old, new in elsewhere:
                old.copy_(new)
            return returned

        try:
            replay, returned = RECORDERS[self._device.type](play, self._device)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            return self._give_up(
                f"{why} (PyTorch's allocator may not recover: start again without)"
            )
        self._recording = _Recording(
            replay,
            returned,
            batch,
            rates,
            [inputs[k] for k in self._rates],
            [inputs[k] for k in self._frozen],
            self._places(inputs),
        )
        return self._recording

    def _give_up(self, why: str) -> None:
        self._given_up = True
        say_why(why)


def _nothing_to_watch() -> contextlib.AbstractContextManager[list[str]]:
    return contextlib.nullcontext([])


def say_why(why: str) -> None:
    """Report in one line why a step does not run as one CUDA graph."""
    warnings.warn(
        f"{CUDA_GRAPH}: the step is played op by op, since {why}", stacklevel=users_level()
    )


def tensor_rates(graph: fx.Graph, num_inputs: int) -> set[int]:
    """Positions of the input numbers that may be float32 tensors: learning rates that only fused updates in
    place read."""
    feeds = [n for n in graph.nodes if n.op == "placeholder"][:num_inputs]
    updates = {kernel.overwriting for kernel in KERNELS}
    return {
        k
        for k, feed in enumerate(feeds)
        if feed.users
        and all(user.target in updates and _as_rate(feed, user) for user in feed.users)
    }


def _as_rate(number: fx.Node, update: fx.Node) -> bool:
    read = [name for name, value in update.kwargs.items() if value is number]
    return read == ["lr"] and not any(number is x for x in update.args)
