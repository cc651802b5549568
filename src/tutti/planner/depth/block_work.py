"""The work of a model by pieces, from a program: that of a shallow one if its layers repeat.

    first     everything before the units                  embeddings
    layers    one unit of each run of repeated layers; or every module of a model whose layers do not repeat
    last      everything behind them                       norm, logits, loss

The program is that of one micro-batch on the ranks of the model's axes (`tensor`, `seq`, `expert`): `data`,
`pipe`, `zero` and the number of micro-batches only compose pieces (`composed.py`).
"""

from __future__ import annotations

import operator
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, fx

from tutti.costs.collective_seconds import collective_seconds, sent_nbytes
from tutti.costs.graph_seconds import collective_call
from tutti.costs.kernel_seconds import LAUNCHES
from tutti.costs.rank_groups import RankGroups
from tutti.graph.analysis.aliases import aliased, roots_of
from tutti.graph.analysis.cost import nbytes_of
from tutti.graph.analysis.draws import is_draw
from tutti.graph.analysis.liveness import held
from tutti.graph.analysis.state import is_state
from tutti.graph.analysis.storage import Storages
from tutti.graph.edits.edit import RECOMPUTED
from tutti.graph.ops import collectives
from tutti.graph.ops.fused_updates import KERNELS
from tutti.partition.partition import Program
from tutti.passes.bucket import BUCKET_NBYTES, LARGE_BUCKET_NBYTES, SPAN, bucket_shares
from tutti.passes.pass_table import optimized
from tutti.passes.recompute import is_recomputable
from tutti.passes.target import Target
from tutti.pipeline.micro_batches.moments import is_linear
from tutti.pipeline.stages.convolution_halves import convolutions_in_halves
from tutti.planner.depth.dropped_values import Drop, drops_of
from tutti.planner.depth.module_units import ModuleUnits
from tutti.planner.depth.repeated_layers import ShortUnits
from tutti.planner.depth.step_pieces import MODEL_AXES, Blocks, Layers, Piece, TiedWeight
from tutti.planner.depth.unit_parts import UnitParts
from tutti.planner.estimates.priced_machine import PricedKernels, PricedMachine

# Passes that join ops of several layers, which would belong to no piece.
_JOINS = ("foreach", "bucket", "early_update", "fused_update", "overlap")
_FUSED = {target for k in KERNELS for target in (k.op, k.overwriting, k.overwrite)}
# Sums of the gradients of a tied weight.
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
# Axes beside `data` that split the batch, and the bytes of gradients that add up over each.
_BATCH_AXES = {"seq": "over_seq", "expert": "over_expert"}
# The number of buckets of these bytes.
_COUNTS = {
    "gradients": "num_sums",
    "read": "num_gathers",
    "read_again": "num_again",
    "recomputed": "num_recomputed",
}


def blocks_of(program: Program, machine: PricedMachine, units: ShortUnits | ModuleUnits) -> Blocks:
    """Read the pieces off the program of a model with these units."""
    return _BlockReader(program, machine, units).read()


class _BlockReader:
    def __init__(
        self, program: Program, machine: PricedMachine, units: ShortUnits | ModuleUnits
    ) -> None:
        self.program, self.machine, self.units = program, machine, units
        self.groups = RankGroups(program.layout.mesh, machine.topology.host_size)
        donated = frozenset(program.captured.updated)
        self.graph = optimized(program, Target(donated=donated), without=_JOINS)
        convolutions_in_halves(self.graph)
        self.sums: dict[tuple[str, str], float] = {}
        self.values: dict[str, dict[fx.Node, float]] = {}
        self.exchanged: dict[fx.Node, float] = {}
        self.gradients: set[fx.Node] = set()
        self.pieces: dict[fx.Node, str] = {}
        self.moved: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def read(self) -> Blocks:
        self._times()
        self._kept()
        self._again()
        self._delayed()
        self._state()
        self._most()
        drops = [
            tuple(self._drops(name, self._size(run)) for name in self._names(run, 0))
            for run in range(len(self.units.runs))
        ]
        first, layers, last = self._pieces(BUCKET_NBYTES)
        num_pieces = sum(len(pieces) * count for pieces, count in layers)
        messages = self._messages() if self.units.fills_gaps else ()
        message = statistics.median(messages) if messages else self._message()
        largest = max(map(nbytes_of, self.gradients), default=0)
        rest = tuple(drops), messages, largest, self._batch(), self._tied(num_pieces)
        many = self._pieces(LARGE_BUCKET_NBYTES)
        return Blocks(first, layers, last, message, *rest, among_many=many)

    def _pieces(self, most_nbytes: float) -> tuple[Piece, Layers, Piece]:
        """The first pieces, those of layers and the last, with buckets of at most so many bytes."""
        self._buckets(most_nbytes)
        last, layers = self._piece("last"), []
        for i, (count, unit, num_layers) in enumerate(self.units.runs):
            names, size = [self._names(i, k) for k in range(count)], self._size(i)
            first = [self._piece(name) for name in names[0]]
            layers.append((tuple(p.times(1 / size) for p in first), num_layers * size // unit))
            for others in names[1:]:  # the last of all layers recomputes nothing, and keeps more
                for piece, name in zip(first, others, strict=True):
                    more = last + self._piece(name) + piece.times(-1)
                    last = replace(more, within=last.within, passing=last.passing)
        return self._piece("first"), tuple(layers), last

    def _size(self, run: int) -> int:
        """How many layers a piece of a run has: those of a unit in one part count as equal."""
        _, unit, _ = self.units.runs[run]
        return unit if len(self._names(run, 0)) == 1 else 1

    def _names(self, run: int, unit: int) -> list[str]:
        """Of the pieces of a unit."""
        count = 1 if self._parts is None else self._parts.count(run)
        return [f"run {run}.{unit}.{part}" for part in range(count)]

    @cached_property
    def _parts(self) -> UnitParts | None:
        """The parts of repeated layers; None without any."""
        if isinstance(self.units, ModuleUnits):
            return None
        regions = ("forward", "backward")
        nodes = [n for n in self.graph.nodes if n.meta.get("region") in regions]
        return UnitParts(nodes, self.units, self._bytes_behind)

    def _bytes_behind(self, node: fx.Node) -> float:
        """Bytes of values of the batch and of weights that cross right behind a node of the forward."""
        return self._crossing[self._position[node]]

    @cached_property
    def _crossing(self) -> list[float]:
        """By position, the bytes that cross behind it, in the forward."""
        roots, last = self._roots, dict[fx.Node, int]()
        for node in self.graph.nodes:
            if node.meta.get("region") == "forward" and node.op == "call_function":
                for x in node.all_input_nodes:
                    last[roots.get(x) or x] = self._position[node]
        steps = [0.0] * (len(self._position) + 1)
        for root, end in last.items():
            if root in self._of_batch and root in self._of_weights:
                steps[self._position[root]] += nbytes_of(root)
                steps[end] -= nbytes_of(root)
        return list(accumulate(steps))

    def _piece(self, name: str) -> Piece:
        found = {f.name: self.sums.get((name, f.name), 0.0) for f in fields(Piece)}
        return replace(Piece(), **found)

    def _add(self, node: fx.Node, what: str, amount: float) -> None:
        key = self._piece_of(node), what
        self.sums[key] = self.sums.get(key, 0.0) + amount

    def _spend(self, node: fx.Node, region: str, seconds: float) -> None:
        self._add(node, region, seconds)
        if node in self._of_inputs:
            self._add(node, "inputs", seconds)

    @cached_property
    def _priced(self) -> PricedKernels:
        return self.machine.kernels(self.graph)

    @property
    def _kernels(self) -> Mapping[fx.Node, float]:
        return self._priced.seconds

    @property
    def _memory_rate(self) -> float:
        device = self.machine.cluster.device
        return device.bandwidth.value * device.memory_efficiency.value

    def _times(self) -> None:
        (kernels, limits), memory = self._priced, self._memory_rate
        for node in self.graph.nodes:
            region = node.meta.get("region")
            if node in kernels and region in ("forward", "backward"):
                self._spend(node, region, kernels[node])
                if node in limits:
                    self._add(node, limits[node], kernels[node])
                if region == "forward" and node not in self._of_batch:
                    self._add(node, "casting", kernels[node])
                    self._add(node, "cast_launches", self.machine.launch_seconds)
            elif node in kernels and region == "update":
                seconds = _moved_nbytes(node) / memory
                self._add(node, "update", seconds)
                if limits.get(node) == LAUNCHES and not _is_joined(node):
                    self._add(node, "update_launches", max(0.0, kernels[node] - seconds))
            elif region is not None:
                self._exchange(node, region)

    def _exchange(self, node: fx.Node, region: str) -> None:
        call = collective_call(node)
        if call is None or not MODEL_AXES & set(call.axes):
            return
        if region == "update" and (over := _BATCH_AXES.keys() & call.axes):
            for axis in over:
                self._add(node, _BATCH_AXES[axis], call.nbytes)
            return
        group = self.groups[tuple(a for a in call.axes if a in MODEL_AXES)]
        if group.size == 1:
            return
        seconds = collective_seconds(call.kind, call.nbytes, group, self.machine.topology)
        seconds += self.machine.launch_seconds
        within, across = sent_nbytes(call.kind, call.nbytes, group)
        if region == "update":  # of a gradient
            self._add(node, "update", seconds)
            self._add(node, "late_sent", within)
            self._add(node, "late_across", across)
            return
        if region == "backward" and node.target in collectives.REDUCTIONS and _ends_in_update(node):
            self._add(node, "joint", seconds)
            self._add(node, "joint_sent", within)
            self._add(node, "joint_across", across)
        self.exchanged[node] = seconds
        self._spend(node, region, seconds)
        self._add(node, "exchange", seconds)
        if region == "forward":
            self._add(node, "ahead", seconds)
        if region == "forward" and is_recomputable(node):
            self._add(node, "moved_again", seconds)
            self._add(node, "again_sent", within)
            self._add(node, "again_across", across)
        elif region == "forward":
            self._add(node, "once", nbytes_of(node))
        self._add(node, "sent", within)
        self._add(node, "sent_across", across)

    def _kept(self) -> None:
        """Bytes of values from the forward that the backward reads: of the batch, or of weights alone."""
        roots, of_batch = self._roots, self._of_batch
        counted: set[fx.Node] = set()
        for node in self.graph.nodes:
            root = roots.get(node) or node
            later = any(
                u.meta.get("region") == "backward" or RECOMPUTED in u.meta for u in node.users
            )
            if node.meta.get("region") != "forward" or not later or root in counted:
                continue
            if root.op != "call_function" or RECOMPUTED in node.meta:
                continue
            if root.meta.get("region") == "backward":
                continue  # a forward's value, moved for the backward
            counted.add(root)
            self._add(root, "kept" if root in of_batch else "cast", nbytes_of(root))
            if root in of_batch:
                self.values.setdefault(self._piece_of(root), {})[root] = nbytes_of(root)

    def _again(self) -> None:
        """Seconds of the forward that a recomputation of each piece takes."""
        for piece, values in self.values.items():
            inside = self._forward_of[piece]
            stack = list(values.keys() - self._leaving(inside))
            found = set[fx.Node]()
            while stack:
                node = stack.pop()
                made = node in inside and node in self._of_batch and is_recomputable(node)
                if made and node not in found:
                    found.add(node)
                    stack += node.all_input_nodes
            spent = (self._kernels.get(n, self.exchanged.get(n, 0.0)) for n in found)
            self.sums[piece, "again"] = sum(spent)

    def _leaving(self, inside: set[fx.Node]) -> set[fx.Node]:
        """The values of these nodes of the forward that other nodes of it read."""
        roots = self._roots
        return {
            roots.get(n) or n
            for n in inside
            for u in n.users
            if u.meta.get("region") == "forward" and u not in inside
        }

    def _delayed(self) -> None:
        """Bytes of a micro-batch that gradients of weights read, and an earlier part has made."""
        roots = self._roots
        counted: set[fx.Node] = set()
        for node in self.graph.nodes:
            late = node.meta.get("region") == "backward" and node not in self._of_inputs
            if not late or node.target is operator.getitem:
                continue
            for x in node.all_input_nodes:
                root = roots.get(x) or x
                made_before = root.meta.get("region") == "forward" or root in self._of_inputs
                if root in self._of_batch and made_before and root not in counted:
                    counted.add(root)
                    self._add(node, "delayed", nbytes_of(root))

    @cached_property
    def _of_inputs(self) -> set[fx.Node]:
        """The nodes of the backward on which one of another piece depends, but for a sum of gradients."""
        found: set[fx.Node] = set()
        pieces = {
            n: self._piece_of(n) for n in self.graph.nodes if n.meta.get("region") == "backward"
        }
        for node in reversed(pieces):
            for user in node.users:
                apart = user in pieces and pieces[user] != pieces[node]
                if user in found or (apart and user.target not in _SUMS):
                    found.add(node)
        return found

    def _drops(self, name: str, unit: int) -> tuple[Drop, ...]:
        """What a piece of `unit` layers may recompute, but for what later ones read."""
        inside = self._forward_of.get(name, set())
        lasting = set() if self.units.fills_gaps else self._leaving(inside)
        values = {v: x for v, x in self.values.get(name, {}).items() if v not in lasting}
        made = drops_of(values, self._kernels, inside)
        return tuple(Drop(d.nbytes / unit, d.seconds / unit) for d in made)

    @cached_property
    def _forward_of(self) -> Mapping[str, set[fx.Node]]:
        """The nodes of the forward of each piece."""
        found: dict[str, set[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.meta.get("region") == "forward":
                found.setdefault(self._piece_of(node), set()).add(node)
        return found

    @cached_property
    def _roots(self) -> Mapping[fx.Node, fx.Node]:
        return roots_of(self.graph)

    @cached_property
    def _of_batch(self) -> set[fx.Node]:
        """Nodes of the batch, and of random numbers, which differ for each micro-batch."""
        return self._after(lambda n: is_draw(n) or (n.op == "placeholder" and not is_state(n)))

    @cached_property
    def _of_weights(self) -> set[fx.Node]:
        return self._after(lambda n: n.op == "placeholder" and is_state(n))

    def _after(self, begins: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """The nodes for which `begins` holds, and those that depend on one."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if begins(node) or any(x in found for x in node.all_input_nodes):
                found.add(node)
        return found

    def _state(self) -> None:
        entries = {s.name: s for s in self.program.captured.state}
        for node in self.graph.nodes:
            if node.op == "placeholder" and is_state(node):
                entry = entries.get(node.meta["name"])
                kind = "parameters" if entry is not None and entry.kind == "parameter" else "slots"
                owner = entry.owner or entry.name if entry else ""
                self._add_state(owner, kind, nbytes_of(node))
                if kind == "parameters":
                    self._read(node)
                    if self._is_split(node):
                        self._add_state(owner, "split_parameters", nbytes_of(node))
                        self._add_state(owner, "split_gradients", self._nbytes_of_gradient(node))
        roots = self._roots
        for node in self.graph.nodes:
            into_update = any(u.meta.get("region") == "update" for u in node.users)
            root = roots.get(node) or node
            is_new = root not in self.gradients
            if node.meta.get("region") == "backward" and into_update and is_new:
                self.gradients.add(root)
                self._add_moved(node, "gradients", _moved_to_update(node))
                # A read of the sum, or a kernel of its own.
                passes = 1 if self._is_added(root) else 3
                self._add(node, "adding", passes * nbytes_of(node) / self._memory_rate)
                self._add(node, "add_launches", self.machine.launch_seconds)
                if passes > 1:
                    self._add(node, "apart_launches", self.machine.launch_seconds)

    def _is_split(self, weight: fx.Node) -> bool:
        """Whether `expert` splits a weight."""
        return "expert" in self.program.storage[weight.meta["name"]].axes

    def _add_moved(self, node: fx.Node, what: str, nbytes: int) -> None:
        """Bytes of a weight or a gradient that a collective over `data` moves."""
        self._add(node, what, nbytes)
        key = self._piece_of(node), what
        self.moved.setdefault(key, []).append((self._position[node], nbytes))

    def _buckets(self, most_nbytes: float) -> None:
        """Count the buckets of each piece, a mean over equal ones: the tensors of all layers fill them in
        order."""
        for what, count in _COUNTS.items():
            found = self._in_order(what)
            sizes, positions = [x[0] for x in found], [x[2] for x in found]
            shares = bucket_shares(sizes, most_nbytes, positions, SPAN * self._length)
            own: dict[str, float] = {}
            for (_, piece, _), share in zip(found, shares, strict=True):
                own[piece] = own.get(piece, 0.0) + share
            for i, (units, unit, num_layers) in enumerate(self.units.runs):
                for name, *equal in zip(*(self._names(i, k) for k in range(units)), strict=True):
                    mean = own.get(name, 0.0) * unit / num_layers
                    own |= dict.fromkeys((name, *equal), mean)
            self.sums |= {(piece, count): number for piece, number in own.items()}

    def _in_order(self, what: str) -> list[tuple[int, str, float]]:
        """The bytes that a collective moves of each tensor, with its piece and its position, of all layers of
        the model."""
        rows: list[tuple[list[tuple[int, int, str]], float]] = []
        region = "forward" if what == "read" else "backward"
        for names, times in self._rows:
            row = sorted((*x, name) for name in names for x in self.moved.get((name, what), ()))
            span = sum(self._num_nodes[name, region] for name in names)
            rows += [(row, span)] * (times if row else 0)
        found, begin = list[tuple[int, str, float]](), 0.0
        for row, span in sorted(rows):
            for k, (_, nbytes, name) in enumerate(row, 1):
                found.append((nbytes, name, begin + span * k / len(row)))
            begin += span
        return found

    @property
    def _rows(self) -> list[tuple[list[str], int]]:
        """Names of pieces that follow each other, and how many times they do in the whole model."""
        runs = [(self._names(i, 0), n // unit) for i, (_, unit, n) in enumerate(self.units.runs)]
        return [(["first"], 1), *runs, (["last"], 1)]

    @cached_property
    def _num_nodes(self) -> Counter[tuple[str, str]]:
        """By piece and region, the nodes of forward and backward."""
        regions = ((n, n.meta.get("region")) for n in self.graph.nodes)
        return Counter((self._piece_of(n), r) for n, r in regions if r in ("forward", "backward"))

    @cached_property
    def _length(self) -> float:
        """The nodes of a graph with all layers, but for the update."""
        own = sum(node.meta.get("region") != "update" for node in self.graph.nodes)
        whole = sum(
            times * self._num_nodes[name, region]
            for names, times in self._rows
            for name in names
            for region in ("forward", "backward")
        )
        return own * whole / max(1, self._num_nodes.total())

    def _read(self, weight: fx.Node) -> None:
        """Bytes of a weight as the forward reads it: of its casts, if nothing else reads it."""
        readers = [u for u in weight.users if u.meta.get("region") == "forward"]
        if readers:
            is_cast = all(u.target is torch.ops.aten._to_copy.default for u in readers)
            nbytes = nbytes_of(readers[-1] if is_cast else weight)
            self._add_moved(readers[0], "read", nbytes)
            if self._is_split(weight):
                self._add(readers[0], "split_read", nbytes)
            again = self._read_late(weight)
            if again:
                self._add_moved(readers[-1], "read_again", again)
            # The backward keeps results that are smaller, such as rows of an embedding.
            if again or nbytes <= sum(map(nbytes_of, readers)):
                self._add_moved(readers[-1], "recomputed", again or nbytes)

    def _read_late(self, weight: fx.Node) -> int:
        """Bytes of a weight, or of a cast of it, that the backward reads, through views, too."""
        stack, found = [(weight, nbytes_of(weight))], 0
        while stack:
            node, nbytes = stack.pop()
            for user in node.users:
                if user.meta.get("region") == "backward":
                    found = max(found, nbytes)
                elif user.target is torch.ops.aten._to_copy.default:
                    stack.append((user, nbytes_of(user)))
                elif aliased(user) is not None:
                    stack.append((user, nbytes))
        return found

    def _copied(self, node: fx.Node, name: str) -> str:
        """Of a copy outside of all layers: the name of the weight that it casts, or whose gradient it is."""
        begin, given = node, name
        while self.units.of(name) is None and not is_state(node) and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
            name = node.meta.get("module") or ""
        if is_state(node):
            return self._owners.get(node.meta["name"], "")
        into_update = any(u.meta.get("region") == "update" for u in begin.users)
        return name if into_update else given

    @cached_property
    def _owners(self) -> dict[str, str]:
        return {s.name: s.owner or s.name for s in self.program.captured.state}

    def _add_state(self, name: str, what: str, amount: float) -> None:
        key = self._piece_of_state(name), what
        self.sums[key] = self.sums.get(key, 0.0) + amount

    def _piece_of_state(self, name: str) -> str:
        return self._piece_of_name(name, self._readers.get(name, "last"))

    @cached_property
    def _readers(self) -> dict[str, str]:
        """The piece at the first operation of the forward that reads a state, by the state's name."""
        found: dict[str, str] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder" and is_state(node):
                readers = (u for u in node.users if u.meta.get("region") == "forward")
                if positions := [self._position[u] for u in readers]:
                    found[node.meta["name"]] = self._outside(min(positions))
        return found

    @cached_property
    def _position(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}

    @cached_property
    def _inside(self) -> Mapping[str, list[tuple[int, str]]]:
        """The positions of the nodes of units, with their pieces, by region."""
        found: dict[str, list[tuple[int, str]]] = {"forward": [], "backward": []}
        for node in self.graph.nodes:
            region, name = node.meta.get("region"), node.meta.get("module") or ""
            if region in found and self.units.of(name) is not None:
                found[region].append((self._position[node], self._piece_of_name(name, "", node)))
        return found

    def _outside(self, position: int) -> str:
        """The piece of a node of no unit, by its position."""
        forward, backward = self._inside["forward"], self._inside["backward"]
        if (forward and position < forward[0][0]) or (backward and position > backward[-1][0]):
            return "first"
        if not self.units.fills_gaps:
            return "last"
        nodes = backward if backward and position > backward[0][0] else forward
        if not nodes or (nodes is forward and position > forward[-1][0]):
            return "last"
        return nodes[bisect_right(nodes, position, key=lambda found: found[0]) - 1][1]

    def _piece_of(self, node: fx.Node) -> str:
        """The piece of a node, asked for many times."""
        if node not in self.pieces:
            self.pieces[node] = self._new_piece_of(node)
        return self.pieces[node]

    def _new_piece_of(self, node: fx.Node) -> str:
        """By its module; in the update by the state or the gradient that it reads; otherwise by its position.

        A collective belongs to its operand's piece, a gather to that of its first reader.
        """
        if node.meta.get("region") == "update":
            return self._updated.get(node, "last")
        at = node
        if node.target is collectives.all_gather and node.users:
            at = min(node.users, key=self._position.__getitem__)
        elif node.target in collectives.COLLECTIVES and node.all_input_nodes:
            at = _made(node.all_input_nodes[0])
        name = at.meta.get("module") or node.meta.get("module") or ""
        if self.units.of(name) is None:
            name = self._copied(node, name)
        return self._piece_of_name(name, self._outside(self._position[at]), at)

    @cached_property
    def _updated(self) -> dict[fx.Node, str]:
        """The piece of each node of the update, from its operands on."""
        found: dict[fx.Node, str] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder" and is_state(node):
                found[node] = self._piece_of_state(self._owners.get(node.meta["name"], ""))
            elif node.meta.get("region") == "backward" and not isinstance(
                node.meta.get("val"), list
            ):
                found[node] = self._piece_of(node)
            elif node.meta.get("region") == "update":
                found[node] = _joint([(x, found[x]) for x in node.all_input_nodes if x in found])
        return found

    def _piece_of_name(self, name: str, otherwise: str, node: fx.Node | None = None) -> str:
        unit = self.units.of(name)
        if unit is None:
            return otherwise
        part = 0
        if self._parts is not None:
            part = self._parts.of_name(name) if node is None else self._parts.of(node, name)
        return f"run {unit[0]}.{unit[1]}.{part}"

    def _most(self) -> None:
        """The most bytes within each piece, above those that it and earlier pieces keep."""
        units = [(i, k) for i, run in enumerate(self.units.runs) for k in range(run[0])]
        order = ["first", *(name for unit in units for name in self._names(*unit))]
        kept, left = dict[str, float](), 0.0
        for name in [*order, "last"]:
            left += self.sums.get((name, "kept"), 0.0) + self.sums.get((name, "cast"), 0.0)
            kept[name] = left
        piece, made, before = "", 0.0, 0.0
        for node, nbytes in held(self.graph, Storages(self.graph, self.program.captured.mode)):
            region = node.meta.get("region")
            if region not in ("forward", "backward"):
                continue
            if self._piece_of(node) != piece:
                piece, before = self._piece_of(node), made
            own = nbytes_of(node) if node in self.gradients else 0.0
            above = nbytes - kept[piece]
            self._raise(piece, "within", above - before)
            self._raise(piece, "passing", above - made - (own if self._is_added(node) else 0.0))
            made += own

    def _raise(self, piece: str, what: str, nbytes: float) -> None:
        self.sums[piece, what] = max(nbytes, self.sums.get((piece, what), 0.0))

    def _is_added(self, gradient: fx.Node) -> bool:
        """Whether the sum over micro-batches reads the operands of a gradient's op, as `passes.accumulate`
        writes it."""
        wide = gradient.target is torch.ops.aten._to_copy.default and not self.machine.shares_memory
        return wide or gradient.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)

    def _batch(self) -> float:
        given = [n for n in self.graph.nodes if n.op == "placeholder" and not is_state(n)]
        return sum(map(nbytes_of, given))

    def _tied(self, num_pieces: int) -> tuple[TiedWeight, ...]:
        """Weights that operations of two pieces read in the forward, neither of them a repeated layer."""
        number = {"first": 0, "last": 1 + num_pieces}
        if self.units.fills_gaps:
            number |= {f"run {i}.0.0": 1 + i for i in range(len(self.units.runs))}
        found = []
        for node in self.graph.nodes:
            if node.op != "placeholder" or not is_state(node):
                continue
            readers = [u for u in node.users if u.meta.get("region") == "forward"]
            pieces = {self._piece_of(u): u for u in readers}
            if len(pieces) > 1 and pieces.keys() <= number.keys():
                first, last = (pick(pieces, key=number.__getitem__) for pick in (min, max))
                ends, nbytes = (number[first], number[last]), nbytes_of(node)
                read = min(nbytes, nbytes_of(pieces[last]))
                found.append(TiedWeight(*ends, nbytes, read, self._nbytes_of_gradient(node)))
        return tuple(found)

    def _nbytes_of_gradient(self, weight: fx.Node) -> float:
        """Bytes of a weight's gradient; 0 without one."""
        updated = any(u.meta.get("region") == "update" for u in weight.users)
        return float(nbytes_of(weight)) if updated else 0.0

    def _messages(self) -> tuple[float, ...]:
        """Bytes at the end of each piece: of values of the batch and of weights that a later piece reads.

        Each stage of a pipeline has the batch, and computes by itself what depends on the batch alone.
        """
        names = ["first", *(f"run {i}.0.0" for i in range(len(self.units.runs))), "last"]
        number = {name: i for i, name in enumerate(names)}
        roots, ends = self._roots, dict[fx.Node, int]()
        begins: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if node.meta.get("region") != "forward" or node.op != "call_function":
                continue
            at = number[self._piece_of(node)]
            begins[node] = at
            for x in node.all_input_nodes:
                root = roots.get(x) or x
                ends[root] = max(ends.get(root, 0), at)
        crossing = [0.0] * (len(names) - 1)
        for root, end in ends.items():
            if root in begins and root in self._of_batch and root in self._of_weights:
                for k in range(begins[root], end):
                    crossing[k] += nbytes_of(root)
        return tuple(crossing)

    def _message(self) -> float:
        """Bytes of the largest value of the batch that crosses from one layer to a later one."""
        best = 0.0
        for node in self.graph.nodes:
            if node.meta.get("region") != "forward" or node not in self._of_batch:
                continue
            own = self.units.of(node.meta.get("module") or "")
            readers = [u for u in node.users if u.meta.get("region") == "forward"]
            others = {self.units.of(u.meta.get("module") or "") for u in readers}
            if own is not None and others - {own, None}:
                best = max(best, nbytes_of(node))
        return best


def _moved_to_update(gradient: fx.Node) -> int:
    """Bytes of a gradient where ranks add it up: before a collective for the update, or behind it."""
    (user, *others) = (u for u in gradient.users if u.meta.get("region") == "update")
    moved = not others and user.target in collectives.COLLECTIVES
    return min(nbytes_of(gradient), nbytes_of(user)) if moved else nbytes_of(gradient)


def _ends_in_update(reduction: fx.Node) -> bool:
    """Whether only a gradient's sum reads it, so that a sum over micro-batches may come first."""
    stack = [reduction]
    for node in stack:
        for user in node.users:
            if user.meta.get("region") == "update":
                continue
            if user.target not in _SUMS and not is_linear(user):
                return False
            stack.append(user)
    return True


def _made(node: fx.Node) -> fx.Node:
    """The value before casts for a sum, which have the module of the sum's reader."""
    while node.target is torch.ops.aten._to_copy.default:
        node = node.all_input_nodes[0]
    return node


def _joint(operands: Sequence[tuple[fx.Node, str]]) -> str:
    """The piece of a node of the update, by its operands.

    Numbers, such as a norm, count where they are alone; a value of several pieces, such as the norm of all
    gradients, is of the last.
    """
    large = [piece for node, piece in operands if _numel(node) > 1]
    pieces = large or [piece for _, piece in operands]
    runs = {p for p in pieces if p.startswith("run")}
    if len(runs) > 1:
        return "last"
    return next(iter(runs), pieces[0] if pieces else "last")


def _numel(node: fx.Node) -> int:
    val = node.meta.get("val")
    return val.numel() if isinstance(val, Tensor) else 1


def _is_joined(node: fx.Node) -> bool:
    """Whether `_JOINS` have one kernel for all layers: fused updates, and counts of steps."""
    counts = _numel(node) == 1 and all(x.op == "placeholder" for x in node.all_input_nodes)
    return counts or node.target in _FUSED


def _moved_nbytes(node: fx.Node) -> int:
    return nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes))
