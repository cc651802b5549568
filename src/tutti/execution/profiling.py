"""Times of every op of a few calls, as a trace that browsers show.

With `TUTTI_PROFILE=FOLDER` generated code reads a clock after each op:

    v1 = c0(v0, c1); mark(now())

So a call has the begin and the end of each op, at some 0.1 us each. A `ProgramProfile` keeps those of
`NUM_CALLS` calls of its program, after `NUM_WARM` that it leaves out, and writes its process's file: events
in Chrome's trace format, which Perfetto reads (https://ui.perfetto.dev). Times are those of the host: on a
GPU an op lasts as long as its launch.
"""

from __future__ import annotations

import atexit
import json
import operator
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

from tutti.durable import check_writable, write_whole
from tutti.environment import PROFILE, ROLE
from tutti.errors import TuttiError
from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import loop
from tutti.graph.text import op_name, type_text
from tutti.torch_private.pytrees import tree_leaves

NUM_WARM, NUM_CALLS = 2, 3
OPS, IN_FLIGHT = 0, 1  # rows of a process in the trace
now = time.perf_counter_ns
_OWN = re.compile(r"(rank|worker|server)-[\d.]+\.json")
_START = "start "
_PERIOD = 10**16  # nanoseconds, 115 days
# Collectives of several values: their kind, the values.
_SEVERAL = (collectives.together, collectives.together_, collectives.start)
_COMMUNICATES = (
    *(*collectives.COLLECTIVES, *collectives.JOINED, collectives.finish),
    *(collectives.send, collectives.receive),
)


@dataclass(frozen=True)
class OpNote:
    """One op in words.

    Args:
        name: of the op.
        category: the region, or the kind of an op that is none of the model's.
        shown: its details.
        ends: the position of the op that it ends, if any.
        hidden: leave it out.
    """

    name: str
    category: str
    shown: dict[str, Any]
    ends: int | None = None
    hidden: bool = False


@dataclass
class TimedFunction:
    """A generated function: its ops, and `marks`, a time before the first of them and one after each."""

    name: str
    ops: list[OpNote]
    marks: list[int] = field(default_factory=list)

    def calls(self) -> Iterator[list[int]]:
        """The marks of each call that came to its end, in nanoseconds."""
        size = len(self.ops) + 1
        for begin in range(0, len(self.marks) - size + 1, size):
            yield self.marks[begin : begin + size]


class ProcessTrace:
    """The events of this process, and its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: list[dict[str, Any]] = []
        # Of one clock on every rank; a number of microseconds keeps its fractions if it is not too large.
        self._epoch = time.time_ns() % _PERIOD - now()
        self._programs = 0

    def program(self) -> ProgramProfile:
        """The profile of one more program."""
        self._programs += 1
        return ProgramProfile(self, self._programs)

    def add(self, name: str, category: str, begin: int, end: int, row: int, **shown: Any) -> None:
        """An event from `begin` to `end`, nanoseconds of `now`."""
        times = {"ts": (self._epoch + begin) / 1e3, "dur": (end - begin) / 1e3}
        place = {"pid": _rank(), "tid": row}
        event = {"ph": "X", "name": name, "cat": category, **times, **place, "args": shown}
        self._events.append(event)

    def write(self) -> None:
        """Write the file of this process, whole."""
        if not self._events:
            return
        name, pid = _name(), _rank()
        rows = {OPS: "ops", IN_FLIGHT: "collectives in flight"}
        heads = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}]
        heads += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": text}}
            for row, text in rows.items()
        ]
        ranks = {"rank": pid, "world_size": dist.get_world_size() if dist.is_initialized() else 1}
        whole = {"traceEvents": heads + self._events, "distributedInfo": ranks}
        path = self._folder / f"{name.replace(' ', '-')}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(whole).encode())
        except OSError as error:
            raise TuttiError(
                f"cannot write the trace {path}", why=str(error), fix="a folder with room for it"
            ) from error


class ProgramProfile:
    """The times of some calls of one program."""

    def __init__(self, trace: ProcessTrace, number: int) -> None:
        self._trace, self._number = trace, number
        self._functions: list[TimedFunction] = []
        self._spans: list[tuple[str, str, int, int]] = []
        self._count = 0

    def function(self, name: str, nodes: Sequence[fx.Node]) -> list[int]:
        """The list to which the code of `nodes` appends: before the first, and after each."""
        made = TimedFunction(name, _notes(nodes))
        self._functions.append(made)
        return made.marks

    def timing(self, function: Callable[..., Any], step: int) -> Callable[..., Any]:
        """`function`, a call of the program in step `step` of the run, timed."""

        def timed(*given: Any) -> Any:
            for one in self._functions:
                one.marks.clear()
            self._spans.clear()
            begin = now()
            results = function(*given)
            self._keep(begin, now(), step)
            return results

        return timed

    @contextmanager
    def span(self, name: str, category: str) -> Iterator[None]:
        """Context of what the program does beside its ops."""
        begin = now()
        yield
        self._spans.append((name, category, begin, now()))

    def _keep(self, begin: int, end: int, step: int) -> None:
        """Keep the events of one call, if it is among those to keep."""
        self._count += 1
        if not NUM_WARM < self._count <= NUM_WARM + NUM_CALLS:
            return
        name = f"step {step}, program {self._number}"
        self._trace.add(name, "step", begin, end, OPS, step=step, program=self._number)
        for span in self._spans:
            self._trace.add(*span, OPS)
        for function in self._functions:
            for marks in function.calls():
                self._add(function, marks)
        if self._count == NUM_WARM + NUM_CALLS:
            self._trace.write()

    def _add(self, function: TimedFunction, marks: list[int]) -> None:
        for k, op in enumerate(function.ops):
            if not op.hidden:
                self._trace.add(op.name, op.category, marks[k], marks[k + 1], OPS, **op.shown)
            if op.ends is not None:
                began, since = function.ops[op.ends], marks[op.ends]
                name = began.name.removeprefix(_START)
                self._trace.add(name, op.category, since, marks[k + 1], IN_FLIGHT, **began.shown)


def program_profile() -> ProgramProfile | None:
    """A profile for one more program of this process; None unless `TUTTI_PROFILE` asks for it."""
    folder = PROFILE.read()
    return _trace_at(folder).program() if folder else None


def check_folder(folder: Path) -> None:
    """Make the folder of the traces, without those of an earlier run.

    Raises:
        TuttiError: it cannot be made or written to.
    """
    check_writable(folder, "trace", "a folder that you may write to", lambda: trace_files(folder))


def trace_files(folder: Path) -> list[Path]:
    """The traces in a folder, in the order of ranks, without other files there."""
    found = [file for file in folder.glob("*.json") if _OWN.fullmatch(file.name)]
    return sorted(found, key=lambda file: (len(file.name), file.name))


@cache
def _trace_at(folder: str) -> ProcessTrace:
    made = ProcessTrace(Path(folder))
    atexit.register(made.write)  # a short run has fewer calls than a profile keeps
    return made


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _name() -> str:
    return ROLE.read() or f"rank {_rank()}"


def _notes(nodes: Sequence[fx.Node]) -> list[OpNote]:
    at = {node: k for k, node in enumerate(nodes)}
    return [_note(node, at) for node in nodes]


def _note(node: fx.Node, at: dict[fx.Node, int]) -> OpNote:
    shown: dict[str, Any] = {"line": source_of(node)}
    shown |= {k: node.meta[k] for k in ("module", "region") if node.meta.get(k)}
    if isinstance(node.meta.get("val"), Tensor):
        shown["result"] = type_text(node.meta["val"], node.meta.get("sharding"))
    if node.target not in _COMMUNICATES:
        if node.target is loop:
            return OpNote("micro-batches", "loop", shown)
        category = str(node.meta.get("region") or "op")
        return OpNote(op_name(node), category, shown, hidden=node.target is operator.getitem)
    if node.target is collectives.finish:
        began: Any = node.args[0]
        kind = began.args[0] if began.target is collectives.start else "another stage"
        return OpNote(f"wait for {kind}", "collective", shown, at.get(began))
    if axes := collectives.axes_of(node):
        shown["axes"] = "+".join(axes)
    shown["nbytes"] = _nbytes(node)
    if node.target in _SEVERAL:
        shown["tensors"] = len(node.args[1])  # type: ignore[arg-type]
    return OpNote(_collective_name(node), "collective", shown)


def _collective_name(node: fx.Node) -> str:
    if node.target is collectives.start:
        return f"{_START}{node.args[0]}"
    if node.target in _SEVERAL:
        return str(node.args[0])
    return op_name(node)


def _nbytes(node: fx.Node) -> int:
    """Bytes of this rank's operands."""
    values = [x for n in node.all_input_nodes for x in tree_leaves(n.meta.get("val"))]
    return sum(x.nbytes for x in values if isinstance(x, Tensor))
