"""Runs one partitioned program on this rank."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.channel import Channel
from tutti.comm.collectives.failure import with_line
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.comm.host.segment import SharedMemoryError
from tutti.errors import CommError
from tutti.execution.allocator import FRAGMENTS, give_back_now, keep_freed_memory
from tutti.execution.checked import Checked
from tutti.execution.collector import rarely_collected
from tutti.execution.cuda_graph import CudaGraph, asked_for, obstacle, say_why
from tutti.execution.edge_channels import Edge, EdgeMessages, edges_of, in_common
from tutti.execution.generate import Generated, generate
from tutti.execution.loops import Loops
from tutti.execution.profiling import program_profile
from tutti.graph.edits.quick import quickly_written
from tutti.graph.ops import collectives
from tutti.graph.ops.matmul import is_faster
from tutti.graph.randomness import random
from tutti.partition.partition import Program
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.pipeline.targets import between_ranks, shared_axes
from tutti.pipeline.timed import Timed
from tutti.planner.stages import forecast
from tutti.state.residence import Residence
from tutti.state.shared_storage import Lodger
from tutti.torch_private.autograd_engine import set_grad_enabled
from tutti.user_lines import generated_line, note_line, users_level


class Execution:
    """A program bound to this rank: its collectives' groups, its generated code.

    `donated` names the state that the step may overwrite: updated state that shares no memory. `graph` is
    the executed program, after its passes; None before the first call. `timed` is the program split in time,
    with `micro` or `pipe`; `pipe_rank` is this rank's position along `pipe`. `gives_back`: return free memory
    to the system, such as that of a trace or of state before its sharding; otherwise only fragmented memory.
    """

    def __init__(
        self,
        program: Program,
        seed: int,
        home: Residence,
        *,
        cut: Sequence[str] = (),
        gives_back: bool = True,
    ) -> None:
        self.seed, self._home, self._gives_back = seed, home, gives_back
        self.donated: frozenset[str] = frozenset()
        mesh, rank = program.layout.mesh, 0
        groups: Groups | None = None
        if mesh.num_ranks > 1:
            rank = dist.get_rank()
            groups = home.groups_for(between_ranks(program.graph))
            check_order([describe(n) for n in program.collectives])
        self._coordinates = mesh.coordinates(rank)
        self.timed: Timed | None = None
        if program.layout.in_time:
            target = _target(program, groups, frozenset(program.captured.updated))
            self.timed = in_time(program, cut_at=cut, homes=home.owners, target=target)
            check_order(in_common(self.timed))
            if rank == 0:
                for text in forecast(self.timed).dear_cuts():
                    warnings.warn(text, stacklevel=users_level())
        if self.timed is not None and "pipe" in mesh:
            home.owners.update(self.timed.owners)
        self.pipe_rank = self._coordinates.get("pipe", 0)
        self.program = self.timed.programs[self.pipe_rank] if self.timed else program
        self.player: ProcessGroups | None = None
        channels: Mapping[Edge, Channel] = {}
        if groups is not None and self.timed is not None and "pipe" in mesh:
            channels = edges_of(self.timed, mesh, groups, home.device)
            self.player = ProcessGroups(
                groups, messages=EdgeMessages(mesh, self._coordinates, channels)
            )
        elif groups is not None:
            self.player = ProcessGroups(groups)
        self._profile = program_profile()
        self._loops = self._stage(self.timed, channels) if self.timed is not None else None
        keep_freed_memory()
        self._lodger: Lodger | None = None
        self._moved: dict[int, Tensor] = {}
        self.graph: fx.Graph | None = None
        self._generated: Generated | None = None
        self._recorded: CudaGraph | None = None
        self._checked: Checked | None = None

    @property
    def generated(self) -> Generated:
        """The code, generated at its first use: only then is the overwritable state known."""
        if self._generated is None:
            with rarely_collected(), quickly_written():
                self.graph = self._optimized()
                self._generated = generate(
                    self.graph,
                    self.program.captured.owner,
                    self.player,
                    self.program.mesh,
                    self._coordinates,
                    loops=self._loops,
                    lodged=self._lodger.lodged if self._lodger is not None else {},
                    profile=self._profile,
                )
            if self._gives_back:
                give_back_now()
            else:
                FRAGMENTS.before_new_program()
            if asked_for():
                self._recorded = self._to_record(self.graph, self._generated)
        return self._generated

    def _to_record(self, graph: fx.Graph, generated: Generated) -> CudaGraph | None:
        """The program as a CUDA graph, or None and a line with the reason."""
        device = self._home.device
        if why_not := obstacle(self.program, graph, self.donated, device):
            return say_why(why_not)
        return CudaGraph(self.program, graph, generated.function, device)

    def _optimized(self) -> fx.Graph:
        """The graph to run, and its shared memory; without it if there is no room."""
        groups = self.player.groups if self.player is not None else None
        target = _target(self.program, groups, self.donated)
        graph = optimized(self.program, target)
        if self.player is None:
            return graph
        try:
            inputs = self.program.captured.inputs
            self._lodger = Lodger(graph, inputs, self.player, self._home.shared)
        except SharedMemoryError as error:
            if dist.get_rank() == 0:
                warnings.warn(
                    f"{error}: weights and gradients are copied between ranks, which is slower",
                    stacklevel=users_level(),
                )
            self._lodger = None
            graph = optimized(self.program, replace(target, shared=frozenset()))
        if "pipe" not in self._coordinates:  # pipeline ranks run different programs
            check_order([describe(n) for n in graph.nodes if _communicates(n)])
        return graph

    def _stage(self, made: Timed, channels: Mapping[Edge, Channel]) -> Loops:
        """The player of the loops; with stages on several ranks, over the channels between them."""
        mesh, rank_of, program = self.program.layout.mesh, {}, self.program
        if "pipe" in mesh:
            rank_of = {
                stage: mesh.rank({**self._coordinates, "pipe": made.schedule.rank_of(stage)})
                for stage in range(made.schedule.num_stages)
            }
        owner = program.captured.owner
        given = (owner, self.player, program.mesh, self._coordinates, rank_of, channels)
        return Loops(*given, self._profile)

    def run(self, inputs: list[Any], step: int) -> tuple[list[Any], list[Any]]:
        """(returned leaves, new local state values) for local `inputs`; `inputs` is emptied."""

        def key(stream: int) -> int:
            return random.key(self.seed, stream, step)

        gradients = torch.is_grad_enabled()
        set_grad_enabled(False)  # `torch.no_grad` adds 60 us of Python to a step with cold caches
        try:
            generated = self.generated
            function = self._recorded or generated.function
            if self._profile is not None:
                function = self._profile.timing(function, step)
            if self.player is None:
                return function(inputs, key)
            with _all_or_none(self.player.groups):
                if self._lodger is not None:
                    self._moved = self._lodger.prepare(inputs)
                return function(inputs, key)
        except CommError as error:
            # With its traceback: the report reads the collective and the line from there.
            named = error if error.at else with_line(error, self._line())
            raise named.with_traceback(error.__traceback__) from None
        except Exception as error:  # of an op, as an index out of range
            note_line(error, self._line())
            raise
        finally:
            set_grad_enabled(gradients)

    def moved(self) -> dict[int, Tensor]:
        """The inputs that the last `run` moved to shared memory, by index; once, as they hold memory."""
        found, self._moved = self._moved, {}
        return found

    def _line(self) -> str:
        """The user's line at which the generated code failed."""
        stack = reversed([*traceback.walk_tb(sys.exc_info()[2])])
        return next(filter(None, (generated_line(*at) for at in stack)), "")

    def run_checked(self, inputs: list[Any], step: int) -> tuple[list[Any], list[Any]]:
        """As `run`, node by node; raises at the first NaN or infinity from finite values."""
        self._checked = Checked(
            self.program, self.player, self._coordinates, self._loops, self.seed, step
        )
        return self._checked.run(inputs)

    def refuse_what_came_in(self) -> None:
        """Raise if an input of the last `run_checked`, which counts, brought NaN into its results."""
        if self._checked is not None and self._checked.came_in is not None:
            raise self._checked.came_in


@contextlib.contextmanager
def _all_or_none(groups: Groups) -> Iterator[None]:
    """Context of a step on several ranks: after a failure no further step runs, as the ranks differ."""
    if groups.failed:
        raise CommError(
            f"an earlier step ended half-way on this rank ({groups.failed})",
            why="the ranks are no longer at the same place, and the state may be that of half a step",
            fix="start again from the last checkpoint",
        )
    try:
        yield
    except BaseException as error:
        groups.failed = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise


def _target(program: Program, groups: Groups | None, donated: frozenset[str]) -> Target:
    if groups is None:
        return Target(donated=donated, onednn=is_faster())
    shared = shared_axes(program, lambda axes: groups.shared(axes) is not None)
    return Target(donated=donated, shared=shared, onednn=groups.onednn)


def describe(node: fx.Node) -> str:
    """One collective in one line, the same on every rank: name, arguments, local shapes, line."""
    name = getattr(node.target, "__name__", str(node.target))
    given = [x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta["val"], Tensor)]
    shapes = " ".join(f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in given)
    rest = [a for a in node.args if not isinstance(a, fx.Node | list) or not node.all_input_nodes]
    where = os.path.basename(node.meta.get("source") or "")
    return f"{name} {rest} {shapes} at {where}"


def _communicates(node: fx.Node) -> bool:
    return node.target in (*collectives.COLLECTIVES, *collectives.JOINED)
