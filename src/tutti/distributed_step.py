"""The captured step that a user calls: `Step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tutti.calls.first_call import FirstCall
from tutti.calls.nan_warnings import NanWarnings
from tutti.capture.batch import taken, with_arguments
from tutti.capture.default_device import own_default_in
from tutti.capture.substitutes.sparse import dense
from tutti.environment import CHECK_NAN
from tutti.errors import LayoutError
from tutti.job import Job
from tutti.layout import Layout
from tutti.modes.by_hand import TrainsByHand
from tutti.modes.choice import mode_of
from tutti.modes.compiled_program import Compiled
from tutti.modes.programs import Programs
from tutti.partition.partition import Program
from tutti.pipeline.timed import Timed
from tutti.planning.chosen_layout import chosen
from tutti.propagate.batch_dim import BatchDim
from tutti.recording.run_writer import note
from tutti.recording.watches import watch_of
from tutti.remote_paths import path_of
from tutti.report.collective_records import Record, records
from tutti.saving import step_checkpoint
from tutti.state.whole import Whole, model_state
from tutti.torch_private.optimizer_marks import mark_stepped
from tutti.torch_private.pytrees import tree_unflatten
from tutti.user_lines import OnlyUsersFrames

# The function of a command that only inspects a script (verify, explain), if there is one. Every thread calls
# it instead of a step; if it returns NotImplemented, the step is taken.
Look = Callable[["Step", tuple[Any, ...]], Any]
LOOK: list[Look] = []


@own_default_in("__call__", "state_dict", "load_state_dict", "save", "load", "explain")
class Step:
    """A captured training step, called with the *global* batch.

    Made by `tutti.distribute`. The first call of each form of batch captures, partitions and compiles.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        layout: Layout,
        *,
        automatic: str | None = None,
        predicted_seconds: float | None = None,
        place: Mapping[str, str] | None = None,
        cut: str | Sequence[str] = (),
        batch_dim: BatchDim = None,
        seed: int = 0,
        found: Mapping[str, str] | None = None,
    ) -> None:
        options: Any = {"cut": cut, "batch_dim": batch_dim, "seed": seed, "found": found}
        self._automatic = automatic  # the fixed words of a layout that the first call chooses
        job = Job.of(train_step, model, optimizer, layout, place=place, **options)
        self._bind(job, predicted_seconds)

    def _bind(self, job: Job, predicted_seconds: float | None) -> None:
        """Run `job` from now on; a plan predicted the seconds of a step."""
        self.mode = mode_of(job)
        self._running = running = self.mode.running
        job = running.job
        self.train_step, self.model, self.optimizer = job.trained
        self.layout, self.place, self.cut = job.layout, job.place, job.cut
        self.batch_dim, self.seed = job.batch_dim, job.seed
        self.python, self.agreeing, self.served = running.python, running.agreeing, self.mode.served
        self._programs = Programs(self.mode)
        self._measures = False  # the program of this call
        self._nans = NanWarnings()
        self._watch = watch_of(job, predicted_seconds) if self._automatic is None else None

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """One step on the global batch; returns the results of the training step, global values.

        With replicas: the results of this rank's replica for its rows of the batch.
        """
        args, batch = batch, dense(taken(batch, named))
        if LOOK and (looked := LOOK[-1](self, batch)) is not NotImplemented:
            return looked
        if self._automatic is not None:
            given, self._automatic = self._automatic, None
            self._bind(*chosen(self._running.job, batch, given))
        mode, running, programs, watch = self.mode, self._running, self._programs, self._watch
        if watch is not None:
            watch.begins()
        mode.before(batch)
        try:
            call, found = programs.call(batch)
        except TrainsByHand:
            running.python.draws.put_back()
            self._bind(replace(running.job, by_hand=True), None)
            self.num_steps = running.num_steps
            return self(*args, **named)
        if found is None:
            return self._first_call(*call)
        compiled, given = found
        tensors = [x for x in call[0] if isinstance(x, Tensor)]
        measures = (watch is not None and watch.measures(compiled)) or self._measures
        how = {"checked": CHECK_NAN.read(), "measures": measures}
        returned = programs.played(compiled, given, tensors, **how)
        if compiled.reads is not None:
            compiled, returned = programs.on_its_way(compiled, given, call, returned, **how)
        programs.ended(compiled, running.num_steps)
        captured = compiled.program.captured
        for one in running.optimizers:
            mark_stepped(one)  # for schedulers
        running.num_steps += 1
        mode.after()
        if captured.effects or captured.not_kept:
            self.python.apply(captured, returned[captured.num_returned :])
        if captured.changes:
            self.python.write_into(call[-1], captured)
        returned = returned[: captured.num_returned]
        self._nans.look_at(returned, self.num_steps - 1)
        result = tree_unflatten(returned, captured.returned)
        if watch is not None:
            watch.ended(running.num_steps, result, compiled)
        return result

    def _first_call(self, leaves: list[Any], form: Any, batch: tuple[Any, ...]) -> Any:
        """One eager step, and a program for the next call like it."""
        running = self._running
        running.begin_together(batch)
        assert self._programs.ahead is not None
        call = FirstCall(running.job, self.python, self._programs.ahead)
        with OnlyUsersFrames():
            returned, spec = call.take(batch, running.num_steps)
        running.num_steps += 1
        self._nans.look_at(returned, self.num_steps - 1)
        found = self._programs.found(leaves, form, batch)
        if found is None:
            call.not_over()
        else:
            self._programs.known.last = found[0]
            call.over()
        result = tree_unflatten(returned, spec)
        if self._watch is not None:
            self._watch.ended(running.num_steps, result, None)
        return result

    @property
    def num_steps(self) -> int:
        """The number of steps taken; loading a checkpoint sets it."""
        return self._running.num_steps

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        self._running.num_steps = count

    def program_of(self, batch: Sequence[Any]) -> Program:
        """The program for a call with `batch`, without a run."""
        given = taken(batch)
        self._running.job.refuse_empty(given)
        return with_arguments(self.mode.program_of, self.train_step, self.optimizer, given)

    @property
    def program(self) -> Program:
        """The program of the last call."""
        return self._last_call.program

    @property
    def graph(self) -> Any:
        """The partitioned `torch.fx` graph of the last call; with `micro` or `pipe`, that of this rank's
        pipeline rank, in which one node `loop` contains the part that runs once a micro-batch."""
        made = self._timed
        return made.programs[self._pipe_rank].graph if made else self.program.graph

    @property
    def collectives(self) -> list[Record]:
        """A record for every collective of this rank in a call like the last one.

        One that runs once a micro-batch is one record, with `times`. `explain` shows messages, too.
        """
        return [r for r in records(self.program, self._timed) if r.pipe_rank == self._pipe_rank]

    @property
    def _timed(self) -> Timed | None:
        return self._last.execution.timed if self._last else None

    @property
    def _pipe_rank(self) -> int:
        return self._last.execution.pipe_rank if self._last else 0

    @property
    def _last(self) -> Compiled[Any] | None:
        return self._programs.known.last

    @property
    def _num_traces(self) -> int:
        return self._programs.known.num_traces

    @property
    def _last_call(self) -> Compiled[Any]:
        if self._programs.known.last is None:
            raise LayoutError("the step has not been called yet", fix="call it with a batch first")
        return self._programs.known.last

    def explain(self, *, tensor: str | None = None, graph: bool = False) -> str:
        """The sharding of every tensor, the predicted memory, every collective and its cause, as text.

        After `measure`, the measured memory is beside the predicted one.
        """
        return self._last_call.explain(tensor=tensor, graph=graph)

    def measure(self, *batch: Any, **named: Any) -> Any:
        """One step, as a call, that measures its peak memory (bytes above the memory held before it).

        The memory is that of the program, without the capture by a first call and without rounds between
        replicas. On a CPU the program runs under PyTorch's profiler.
        """
        self._measures = True
        try:
            return self(*batch, **named)
        finally:
            self._measures = False

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers, optimizer slots and the step count, by name; shards are `DTensor`s.

        In a pipeline, this rank's tensors: those of other pipeline ranks are in their ranks' dicts.
        """
        with self.mode.state_here():
            return step_checkpoint.state_dict(self._running)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over tensors by name; cuts whole ones, and re-shards `DTensor`s as needed.

        In a pipeline `state` may omit the tensors of other pipeline ranks. Raises `CheckpointError` for
        other names or shapes, before any change.
        """
        with self.mode.state_replaced():
            step_checkpoint.load_state_dict(self._running, state)

    def whole(self, *, rank: int | None = None, slots: bool = False) -> Whole:
        """A block in which the model's weights are whole, ordinary tensors, to read or write.

            with step.whole():
                text = model.generate(prompt)

        As `tutti.whole(self.model)`: all ranks enter and leave together, and write the same values; or
        `rank` alone has them (`with step.whole(rank=0) as here:`). `step.whole().nbytes` is its additional
        memory. `slots` makes the optimizer's slots whole, too. References kept past the block are not the
        live weights.
        """
        return Whole(self.model, rank=rank, slots=slots)

    def model_state(self, *, rank: int | None = None) -> dict[str, Any]:
        """`model.state_dict()` as on one device, under every layout: whole plain tensors on the CPU.

        They are copies; it gathers one shard after the other; tied weights share memory. All ranks call
        together; with `rank` only that one gets them, and the others an empty dict.
        """
        return model_state(self.model, rank=rank)

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint directory, or the model alone if `path` ends in `.safetensors`.

        A path that ends in `.safetensors.index.json` has several files, as Hugging Face divides them. A
        directory may be remote: a URL of fsspec, such as `"s3://bucket/run"`. It also has the numbers of the
        optimizer's groups, such as the learning rate, which `load` sets.
        """
        with self.mode.state_here():
            if self.mode.writes():
                step_checkpoint.save(self._running, path_of(path), extra)
                note("save", step=self.num_steps, folder=str(path))

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint of `save`, under any layout; returns its `extra`.

        Or the model alone, from a `.safetensors` file, an index, or a directory of `save_pretrained`. Each
        rank reads its part; a model on the meta device takes it at the first call.
        """
        with self.mode.state_replaced():
            extra = step_checkpoint.load(self._running, path_of(path))
        note("restore", step=self.num_steps, folder=str(path))
        return extra
