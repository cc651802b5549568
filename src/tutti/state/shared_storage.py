"""State in shared memory of one host, for programs that gather it there.

    viewed   zero=3: the parts of all ranks side by side, so that the whole is a view
    copied   zero=1, 2: each rank's own copy, which the others can read

State moves there before the first step that needs it and stays. If the user has put another tensor in its
place since, the next step first copies its values; the former one, which the user may hold, leaves the
memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.in_shared_memory import InSharedMemory
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.comm.host.shared_memory import SharedGroup
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import graphs_of
from tutti.passes.shared_state import copied_state, viewed_state
from tutti.torch_private.storages import memory_id

Axes = tuple[str, ...]
_ALIGNMENT = 64


@dataclass
class Lodging:
    """One state tensor in shared memory: `own`, this rank's tensor, and `whole`, all ranks' parts.

    `resident` is the tensor of this memory that the last one to move in has got: the local tensor of a
    shard. Of a tensor stored whole, which has taken over its memory alone, `tenant` is a reference.
    """

    axes: Axes
    own: Tensor
    whole: Tensor | None = None
    resident: Tensor | None = None
    tenant: weakref.ref[Tensor] | None = None

    def move_in(self, value: Tensor) -> Tensor:
        """Write `value`; the tensor that the state gets. The former one, which the user may hold, leaves."""
        before = self.tenant() if self.tenant is not None else None
        for x in (self.resident, before):
            if x is not None and x.numel() and memory_id(x) == memory_id(self.own):
                x.data = x.detach().clone()
        self.own.copy_(value)
        self.resident, self.tenant = self.own.detach(), None
        return self.resident


@dataclass
class SharedState:
    """The state of one model in shared memory, by name; the same for all steps on it.

    They share the memory for buffers, too: programs run one after the other, and keep results elsewhere.
    """

    lodgings: dict[str, Lodging] = field(default_factory=dict)
    arenas: dict[SharedGroup, Tensor] = field(default_factory=dict)

    def arena(self, shared: SharedGroup, nbytes: int) -> Tensor:
        """Memory for the buffers of one program; all ranks of the group call this together."""
        rows = self.arenas.get(shared)
        if rows is None or rows.shape[1] < nbytes:
            # Each is larger than the last by half, so that their number stays small.
            least = 0 if rows is None else rows.shape[1] * 3 // 2
            rows = self.arenas[shared] = shared.arena(max(nbytes, least))
        return rows

    def take(self, graph: fx.Graph, groups: Groups) -> None:
        """Allocate memory for the state that `graph` needs there; all ranks call this together.

        Raises `SharedMemoryError`, on every rank, if it does not fit.
        """
        self._take(viewed_state(graph), groups, side_by_side=True)
        self._take(copied_state(graph), groups, side_by_side=False)

    def _take(
        self, wanted: dict[str, tuple[Axes, fx.Node]], groups: Groups, *, side_by_side: bool
    ) -> None:
        by_axes: dict[Axes, dict[str, Tensor]] = {}
        for name, (axes, node) in wanted.items():
            if name not in self.lodgings:
                by_axes.setdefault(axes, {})[name] = node.meta["val"]
        for axes, values in by_axes.items():
            group, shared = groups[axes], groups.shared(axes)
            assert shared is not None
            ways = group.size if side_by_side else 1
            sizes = {n: -(-v.nbytes * ways // _ALIGNMENT) * _ALIGNMENT for n, v in values.items()}
            total = sum(sizes.values())
            memory = shared.common(total) if side_by_side else shared.arena(total)[group.position]
            at = 0
            for name, value in values.items():
                piece = memory[at : at + value.nbytes * ways].view(value.dtype)
                at += sizes[name]
                if side_by_side:
                    parts = piece.view(ways, *value.shape)
                    own = _alone(parts[group.position])
                    self.lodgings[name] = Lodging(axes, own, parts)
                else:
                    self.lodgings[name] = Lodging(axes, _alone(piece.view(value.shape)))

    def move_in(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in shared memory for state by name, with these values; a value may lie in the memory of
        another, as after an exchange of two layers."""
        lodgings = {name: self.lodgings[name] for name in values}
        taken = {memory_id(one.own) for one in lodgings.values()}
        found = {n: x.clone() if memory_id(x) in taken else x for n, x in values.items()}
        return {name: one.move_in(found[name]) for name, one in lodgings.items()}

    def memory(self) -> set[int]:
        """The ids of the memory of all state."""
        return {memory_id(one.own) for one in self.lodgings.values()}

    def note_tenant(self, name: str, x: Tensor) -> None:
        """Note a tensor stored whole that has moved in; of one in shards a reference would keep PyTorch from
        giving it another dtype."""
        if not isinstance(x, DTensor):
            self.lodgings[name].tenant = weakref.ref(x)


def _alone(x: Tensor) -> Tensor:
    """`x` with a storage of exactly its bytes.

    Copies and pickles of a tensor include its storage, which would hold the state of all ranks; a `DTensor`
    around a part of one has no copy or pickle.
    """
    return torch.from_dlpack(x) if x.numel() else x


class Lodger:
    """Gives one program its state and its buffers in shared memory.

    Args:
        graph: the executed program.
        inputs: the names of its inputs, in order.
        player: runs its collectives.
        home: the model's state in shared memory.

    Raises:
        SharedMemoryError: on every rank, if there is no room.
    """

    def __init__(
        self, graph: fx.Graph, inputs: list[str], player: ProcessGroups, home: SharedState
    ) -> None:
        self._home = home
        arenas = {
            axes: home.arena(_shared(player.groups, axes), nbytes)
            for axes, nbytes in _buffers(graph).items()
        }
        home.take(graph, player.groups)
        viewed, copied = viewed_state(graph), copied_state(graph)
        self._copied = {name: inputs.index(name) for name in copied}
        self._places = {name: inputs.index(name) for name in inputs if name in home.lodgings}
        self._axes = sorted({home.lodgings[name].axes for name in self._places})
        dims = _gathered_dims(graph)
        wholes: dict[tuple[Axes, int], Tensor] = {}
        for name in viewed:
            lodging = home.lodgings[name]
            if lodging.whole is not None and name in dims:
                whole = lodging.whole.view(dims[name])
                wholes[lodging.axes, lodging.own.data_ptr()] = whole
        self._memory: InSharedMemory | None = None
        if arenas or home.lodgings:
            self._memory = player.lodge(arenas, wholes)

    @property
    def lodged(self) -> dict[str, Tensor]:
        """The tensor of each input in shared memory after `prepare`, at every call."""
        return {name: self._home.lodgings[name].own for name in self._places}

    def prepare(self, inputs: list[Any]) -> dict[int, Tensor]:
        """Move `inputs` to shared memory as far as the program needs them there; the moved ones, by index.

        The caller puts them in the place of the tensors that hold the same values outside.
        """
        if self._memory is None:
            return {}
        moved = [
            (name, i)
            for name, i in self._places.items()
            if inputs[i].data_ptr() != self._home.lodgings[name].own.data_ptr()
        ]
        if moved:
            for axes in self._axes:  # no rank may still read the values of the last step
                self._memory.meet(axes)
            own = self._home.move_in({name: inputs[i] for name, i in moved})
            for name, i in moved:
                inputs[i] = own[name]
        self._memory.hold({name: inputs[i] for name, i in self._copied.items()})
        return {i: inputs[i] for _, i in moved}


def _buffers(graph: fx.Graph) -> dict[Axes, int]:
    """The bytes of a graph's buffers by axes."""
    needed: dict[Axes, int] = {}
    for node in _nodes(graph):
        if node.target is collectives.buffer:
            axes: Any = node.args[0]
            offset: Any = node.args[1]
            needed[axes] = max(needed.get(axes, 0), offset + node.meta["val"].nbytes)
    return needed


def _nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph, and of the parts of its loops."""
    return (node for one in graphs_of(graph) for node in one.nodes)


def _shared(groups: Groups, axes: Axes) -> SharedGroup:
    shared = groups.shared(axes)
    assert shared is not None
    return shared


def _gathered_dims(graph: fx.Graph) -> dict[str, torch.Size]:
    """The gathered shape of each viewed state."""
    found: dict[str, torch.Size] = {}
    for node in _nodes(graph):
        if node.target is collectives.together_ and node.args[0] == "all_gather":
            for x, value in zip(node.args[1], node.meta["val"], strict=True):  # type: ignore[arg-type]
                found[x.meta["name"]] = value.shape
    return found
