"""The layout of a training run over ranks: one line of text."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import NoneType
from typing import Any

from tutti.argument_types import check_type
from tutti.errors import LayoutError
from tutti.layout.budget import Budget
from tutti.layout.layout_words import check_marks, number, unknown
from tutti.layout.mesh import Mesh

# Outermost first: ranks that differ in the last axis only are neighbors, on the fastest links.
AXES = ("replica", "pipe", "data", "expert", "seq", "tensor")
# Axes over which `zero` shards state: they split the samples and their tokens, and leave most weights whole.
# The weights of experts, which `expert` splits, have the others.
ZERO_AXES = ("expert", "data", "seq")
# The order of axes that split one dim of a state tensor, major to minor: those of `zero` last, so that one
# plain all-gather over them makes a weight from its shards.
SPLIT_ORDER = ("tensor", "pipe", "replica", *ZERO_AXES)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")
PRECISIONS = ("fp32", "bf16")
# Values of `sync` for workers of servers (`consistency.py` reads them); the others are for replicas.
WITH_SERVERS = ("step", "bounded", "async")


def split_order(axes: Iterable[str]) -> tuple[str, ...]:
    """Sort `axes` as they split one dim of a state tensor, major to minor."""
    return tuple(sorted(axes, key=lambda a: SPLIT_ORDER.index(a) if a in SPLIT_ORDER else -1))


@dataclass(frozen=True)
class Layout:
    """A layout, read from text such as `"data=2 tensor=4 zero=1"`; prints short and parses back.

    Axes: `replica pipe data expert seq tensor`, each with its number of ranks. Options: `zero=0..3`
    (the state sharded over `data`, `seq` and `expert`), `precision=fp32|bf16` (the dtype of the forward and
    its gradients; weights, updates and sums over ranks stay float32), `remat=none|full|2GB|0.5` (the
    backward recomputes no activations, as many as possible, or as few as fit a budget; see `layout.budget`),
    `micro=K` (the step runs on K slices of the batch, one after the other),
    `schedule=gpipe|1f1b|interleaved(v)|zb|zbv` or a file (the order in which the stages of `pipe` take
    micro-batches; 1f1b by default), `sync=average(...)|diloco(...)|gossip(...)|pairs(...)|elastic(...)`
    (how replicas agree; see `replicas.strategies`), `server=S` with `sync=step|bounded(s)|async` (replicas
    are workers, which agree through S servers; see `consistency.py`). Raises `LayoutError` with the nearest
    word for anything else.
    """

    axes: dict[str, int] = field(default_factory=dict)
    zero: int = 0
    micro: int = 1
    schedule: str = ""
    sync: str = ""
    server: int = 0
    precision: str = "fp32"
    remat: str = "none"

    @classmethod
    def parse(cls, text: str | Layout | None) -> Layout:
        """Read the words of `text` in any order; None and "" mean one device.

        A `Layout` is read as its text, so that all its words are checked.
        """
        if isinstance(text, Layout):
            return text._read_again()
        check_type(
            "layout",
            text,
            (str, NoneType),
            wanted="a text",
            fix='layout="data=2", or another text of axis=size words',
            error=LayoutError,
        )
        check_marks(text or "")
        axes: dict[str, int] = {}
        options: dict[str, int | str] = {}
        for word in re.findall(r"[^\s(]+(?:\([^)]*\))?", text or ""):
            name, equals, value = word.partition("=")
            if name in axes or name in options:
                raise LayoutError(
                    f'"{name}" appears twice in layout "{text}"', fix="keep one of them"
                )
            if name in AXES and equals:
                axes[name] = number(name, value, 1, text)
            elif name in ("zero", "micro", "server") and equals:
                options[name] = number(name, value, 1 if name == "micro" else 0, text)
            elif name in _OPTIONS and equals and value:
                options[name] = value
            else:
                raise unknown(word, name, value, text, AXES + _OPTIONS)
        layout = cls(axes={a: axes[a] for a in AXES if a in axes}, **options)  # type: ignore[arg-type]
        layout._check()
        return layout

    def _read_again(self) -> Layout:
        """This layout, checked as a text; another one if its axes are in another order."""
        wrong: Any = {"fix": 'Layout.parse("data=2 zero=1")', "error": LayoutError}
        check_type("axes", self.axes, dict, wanted="a dict of axes and sizes", **wrong)
        for name in ("schedule", "sync", "precision", "remat"):
            check_type(name, getattr(self, name), str, wanted="a text", **wrong)
        text = str(self)
        found = Layout.parse(text)
        return self if found == self and str(found) == text else found

    def _check(self) -> None:
        if self.zero > 3:
            raise LayoutError(
                f"zero={self.zero} in layout is not a level of ZeRO", fix="zero=0, 1, 2 or 3"
            )
        if self.zero and self.zero_ways == 1:
            raise LayoutError(
                f"zero={self.zero} shards state over the axes data, seq and expert, which layout "
                f'"{self}" lacks',
                fix=f"data=2 {self}, or leave zero out",
            )
        self._check_schedule()
        if self.precision not in PRECISIONS:
            half = self.precision in ("fp16", "float16", "half")
            raise LayoutError(
                f'precision="{self.precision}" is unknown',
                why="gradients in float16 need a loss scale, which belongs to the script"
                if half
                else "it is what the forward computes in; weights and sums over ranks stay float32",
                fix=", ".join(PRECISIONS)
                + (
                    "; or the script's own torch.autocast in float16 with GradScaler"
                    if half
                    else ""
                ),
            )
        Budget.parse(self.remat)

    def _check_schedule(self) -> None:
        """A name, `interleaved(v)` for v chunks a rank, or a file."""
        if not self.schedule:
            return
        name, _, chunks = self.schedule.removesuffix(")").partition("(")
        fits = name == "interleaved" and chunks.isdigit() and int(chunks) > 0
        if not self.schedule_file and (name not in SCHEDULES or (chunks and not fits)):
            near = difflib.get_close_matches(name, SCHEDULES, n=1)
            raise LayoutError(
                f'schedule="{self.schedule}" is unknown',
                why="it is none of " + ", ".join(SCHEDULES) + ", nor a file such as ./mine.txt",
                fix=f"did you mean {near[0]}?" if near else "1f1b, interleaved(2), ./mine.txt",
            )

    @property
    def schedule_file(self) -> str:
        """The file that holds the schedule, or ""."""
        return self.schedule if "/" in self.schedule or self.schedule.endswith(".txt") else ""

    def check_available(self) -> None:
        """Refuse words that this version cannot run, and words without effect."""
        if self.schedule and self.axes.get("pipe", 1) == 1:
            raise LayoutError(
                f'schedule="{self.schedule}" orders the stages of a pipeline, which layout "{self}" lacks',
                fix=f"pipe=2 {self}, or leave schedule out",
            )
        if self.server:
            self._check_servers()
        else:
            self._check_replicas()

    def _check_servers(self) -> None:
        """Check that servers have workers and a consistency."""
        servers = f"server={self.server}"
        if self.num_replicas == 1:
            raise LayoutError(
                f'{servers} keeps the weights of workers, which layout "{self}" lacks',
                why="replica=W is the number of workers",
                fix=f'"{self._served(2)}", or leave server out',
            )
        if not self._agrees_by_servers:
            name, bracket, rest = self.sync.partition("(")
            if near := difflib.get_close_matches(name.lower(), WITH_SERVERS, n=1):
                meant = replace(self, sync=near[0] + bracket + rest)
                raise LayoutError(
                    f'"sync={self.sync}" in layout "{self}" is unknown',
                    why="workers agree through servers by " + ", ".join(WITH_SERVERS),
                    fix=f'did you mean "{meant}"?',
                )
            raise LayoutError(
                f'layout "{self}" does not say how its workers agree through servers',
                why=f'"sync={self.sync}" is how replicas agree without servers'
                if self.sync
                else "",
                fix=f'"{replace(self, sync="step")}", sync=bounded(2) or sync=async',
            )
        for name, why in _NOT_SERVED.items():
            given = self.axes.get(name, 1) > 1 or getattr(self, name, None) != _DEFAULTS.get(name)
            if given:
                raise LayoutError(
                    f'"{name}" in layout "{self}" does not go with servers',
                    why=why,
                    fix=f'"{self._served(self.num_replicas)}"',
                )

    @property
    def _agrees_by_servers(self) -> bool:
        return self.sync.partition("(")[0] in WITH_SERVERS

    def _served(self, num_workers: int) -> Layout:
        """A layout of `num_workers` with these servers, without the words that servers exclude."""
        sync = self.sync if self._agrees_by_servers else "step"
        own = {a: n for a, n in self.axes.items() if a not in ("replica", *_NOT_SERVED)}
        return Layout(
            axes={"replica": num_workers, **own},
            sync=sync,
            server=self.server or 1,
            micro=self.micro,
            precision=self.precision,
            remat=self.remat,
        )

    def _check_replicas(self) -> None:
        """Check that replicas have a strategy, and that only replicas have one."""
        if self._agrees_by_servers:
            fix = f'"{self._served(max(self.num_replicas, 2))}"'
            if self.sync == "step" and self.num_replicas > 1:
                fix += f", or data={self.num_replicas} for the same without servers"
            raise LayoutError(
                f'sync="{self.sync}" is how workers agree through servers, which layout "{self}" lacks',
                fix=fix,
            )
        if self.num_replicas > 1 and not self.sync:
            raise LayoutError(
                f'layout "{self}" does not say how its replicas agree',
                why="each replica trains on its own until they exchange weights",
                fix=f'"{self} sync=average(every=16)", or data={self.num_replicas} for one program',
            )
        if self.sync and self.num_replicas == 1:
            two = replace(self, axes={"replica": 2, **self.axes} | {"replica": 2})
            raise LayoutError(
                f'sync="{self.sync}" says how replicas agree, which layout "{self}" lacks',
                fix=f'"{two}", or leave sync out',
            )

    def check_ranks(self, num_ranks: int) -> None:
        """Raise `LayoutError` unless the sizes multiply to `num_ranks`; servers are ranks, too."""
        if self.num_ranks + self.server == num_ranks:
            return
        product = " x ".join(map(str, self.axes.values())) or "1"
        needed, servers = self.num_ranks + self.server, f" and {self.server} are servers"
        raise LayoutError(
            f'layout "{self}" needs {needed} ranks, but {num_ranks} were started',
            why=f"its axes multiply to {product} = {self.num_ranks}{servers if self.server else ''}",
            fix=f"start {needed} ranks, or {self.nearest(num_ranks)}",
        )

    def nearest(self, num_ranks: int) -> str:
        """The nearest layout of `num_ranks`, as an advice says it."""
        found = str(self._fitted(num_ranks))
        return f'"{found}"' if found else '"", the layout of one device'

    def _fitted(self, num_ranks: int) -> Layout:
        """The nearest layout of `num_ranks`: keep other axes that divide it, give `data` the rest."""
        if self.server:
            size = self._served(1).num_ranks
            if (num_ranks - self.server) // size > 1 and (num_ranks - self.server) % size == 0:
                return self._served((num_ranks - self.server) // size)
            return Layout(axes={"data": num_ranks})
        others = {a: s for a, s in self.axes.items() if a != "data"}
        for dropped in range(len(others) + 1):
            kept = dict(list(others.items())[dropped:])
            size = Layout(axes=kept).num_ranks
            if num_ranks % size == 0:
                data = num_ranks // size
                axes = kept | ({"data": data} if data > 1 else {})
                schedule = self.schedule if axes.get("pipe", 1) > 1 else ""
                axes = {a: axes[a] for a in AXES if a in axes}
                zero = self.zero if any(axes.get(a, 1) > 1 for a in ZERO_AXES) else 0
                return replace(self, axes=axes, zero=zero, schedule=schedule)
        return Layout(axes={"data": num_ranks})

    def with_micro(self, micro: int) -> Layout:
        """This layout with another number of micro-batches."""
        return replace(self, micro=micro)

    def without(self, name: str) -> Layout:
        """This layout without one word. Raises `LayoutError` for what is no word."""
        if name in self.axes:
            return replace(self, axes={a: s for a, s in self.axes.items() if a != name})
        if name in AXES:
            return self
        if name not in _DEFAULTS:
            raise LayoutError(
                f"{name!r} is no word of a layout", fix="one of " + " ".join(AXES + _OPTIONS)
            )
        return replace(self, **{name: _DEFAULTS[name]})

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """The axes over which `zero` shards state, and most gradients add up."""
        return tuple(a for a in ZERO_AXES if self.axes.get(a, 1) > 1)

    @property
    def zero_ways(self) -> int:
        """The number of parts of state under `zero`: of a tensor that `expert` does not split, and with a dim
        that they divide."""
        return math.prod(self.axes[a] for a in self.zero_axes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks, servers excluded."""
        return self.mesh.num_ranks

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the layout's axes of size above 1."""
        return Mesh(tuple((a, s) for a, s in self.axes.items() if s > 1))

    @property
    def program_mesh(self) -> Mesh:
        """The mesh of a program's shardings: `stage_mesh`, and `micro` as an axis of time.

        `micro` is the last axis. It has no ranks: each rank runs its micro-batches one after the other.
        """
        axes = self.stage_mesh.axes
        return Mesh((*axes, ("micro", self.micro)) if self.micro > 1 else axes)

    @cached_property
    def stage_mesh(self) -> Mesh:
        """The ranks of one pipeline rank of one replica; with servers, of all workers."""
        apart = ("pipe",) if self.server else ("replica", "pipe")
        return Mesh(tuple((a, s) for a, s in self.mesh.axes if a not in apart))

    @property
    def of_one(self) -> Layout:
        """The layout of one worker of servers: without `replica` and `server`."""
        if not self.server:
            return self
        axes = {a: n for a, n in self.axes.items() if a != "replica"}
        return Layout(axes=axes, micro=self.micro, precision=self.precision, remat=self.remat)

    @property
    def worker_size(self) -> int:
        """The number of ranks of each replica."""
        return self.num_ranks // self.num_replicas

    @property
    def num_replicas(self) -> int:
        """The number of programs that run side by side."""
        return self.axes.get("replica", 1)

    @property
    def in_time(self) -> bool:
        """Whether a step runs in micro-batches or pipeline stages."""
        return self.micro > 1 or self.axes.get("pipe", 1) > 1

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        words = [f"{a}={s}" for a, s in self.axes.items()]
        words += [f"{n}={getattr(self, n)}" for n in _OPTIONS if getattr(self, n) != _DEFAULTS[n]]
        return " ".join(words)


_OPTIONS = tuple(f.name for f in fields(Layout) if f.name != "axes")
# The words that servers exclude, and the reasons.
_NOT_SERVED = {
    "pipe": "a worker gives its gradients away after its last one, so it has no stages that update apart",
    "zero": "the optimizer's state lies on the servers, and a worker's ranks have its weights whole",
    "schedule": "a worker has no stages",
}
_DEFAULTS = {f.name: f.default for f in fields(Layout) if f.name != "axes"}
