"""The residence of a model's state during a run: this rank's shards, behind the user's tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import Optimizer

from tutti.capture.state.lift import StateTensor, optimizers_of, state_of
from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.exchange import broadcast_first
from tutti.comm.collectives.groups import Groups
from tutti.errors import CaptureError, TuttiError
from tutti.graph.players.device import device_of
from tutti.layout import Layout, Mesh, Sharding, split_order
from tutti.replicas.replica_rows import replica_here
from tutti.state.deferred import STORED, Stored, initial_slots, initial_values, is_deferred
from tutti.state.onlookers import warn_of_onlookers
from tutti.state.renewed import renew
from tutti.state.replacing import put_in_place
from tutti.state.shards import Origin, StateShard, as_parameter, origin_of, wrap
from tutti.state.shared_storage import SharedState
from tutti.torch_private.dtensors import local_part, set_local_part, spec_of
from tutti.torch_private.module_tables import share_tensor_hooks
from tutti.torch_private.storages import memory_id


@dataclass(frozen=True)
class WholeBlock:
    """A block of the user's program in which weights are whole: on all ranks, or on `rank` alone.

    `wholes` holds the tensor in the place of each shard, by the shard's id; `line` is the block's first line.
    """

    line: str
    rank: int | None
    wholes: dict[int, Tensor]

    def refused(self) -> TuttiError:
        """The error for a use of the model that needs shards."""
        return TuttiError(
            "a step is called or saved while its model's weights are whole",
            at=self.line,
            why="a step works on this rank's parts, and would not see what the block has written",
            fix="leave the block first: weights are cut again at its end",
        )

    def refused_inside(self) -> TuttiError:
        """The error for a block of more tensors inside this one of a single rank."""
        return TuttiError(
            f"a block of whole tensors is opened within one of rank {self.rank} alone",
            at=self.line,
            why="all ranks gather a tensor together, and the others are not in this block",
            fix="one block of all that is needed: tutti.whole(model, rank=..., slots=True)",
        )


@dataclass
class Residence:
    """The storage of one model's state on this rank, shared by every step on that model.

    `owners` are the pipeline ranks that keep each state tensor; empty without such an axis.
    `renewed` holds, by the id of a replaced tensor, that tensor and the one in its place.
    `settled` are the unchanged tensors: a rank has all of each.
    `fetch` pulls the current weights from servers, if there are any.
    """

    layout: Layout
    compute: dict[str, Sharding] = field(default_factory=dict)
    storage: dict[str, Sharding] = field(default_factory=dict)
    meshes: list[DeviceMesh] = field(default_factory=list)
    groups: Groups | None = None
    shared: SharedState = field(default_factory=SharedState)
    owners: dict[str, frozenset[int]] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    renewed: dict[int, tuple[weakref.ref[Tensor], Tensor]] = field(default_factory=dict)
    settled: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    block: WholeBlock | None = None
    fetch: Callable[[], None] | None = None
    _optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of all steps, in the same order on all ranks."""
        return [one for known in self._optimizers if (one := known()) is not None]

    def note_optimizers(self, optimizer: Any) -> None:
        """Add the optimizers of a step."""
        known = {id(one) for one in self.optimizers}
        new = [one for one in optimizers_of(optimizer) if id(one) not in known]
        self._optimizers += map(weakref.ref, new)

    def join(self, other: Residence, names: Mapping[str, str]) -> None:
        """Leave the tensors of both where `other` has them; `names`: those here, by those there."""
        names = dict(names)
        for known in (*other.compute, *other.storage, *other.owners):
            owner, _, slot = known.removeprefix("optim.").rpartition(".")
            if known.startswith("optim.") and owner in names:
                names[known] = f"optim.{names[owner]}.{slot}"
        for mine, theirs in (
            (self.compute, other.compute),
            (self.storage, other.storage),
            (self.owners, other.owners),
            (self.shared.lodgings, other.shared.lodgings),
        ):
            found: Any = theirs
            mine.update({names[n]: x for n, x in found.items() if n in names})
        self.meshes, self.groups, self.device = other.meshes, other.groups, other.device
        self.shared.arenas = other.shared.arenas
        self.renewed |= other.renewed
        self.settled |= other.settled

    def forget_replaced(self, state: Sequence[StateTensor]) -> None:
        """Forget how tensors lay whose place others of another shape have taken: a new head, a resized
        embedding."""
        for s in state:
            known = self.storage.get(s.name, self.compute.get(s.name))
            if known is not None and known.shape != tuple(s.tensor.shape):
                tables: Any = (self.compute, self.storage, self.owners, self.shared.lodgings)
                for table in tables:
                    table.pop(s.name, None)

    def keeps_whole(self, name: str) -> bool:
        """Whether every rank has all of a state tensor, which is then an ordinary one."""
        return "pipe" not in self.layout.mesh and not self.storage[name].axes

    def now(self, x: Tensor) -> Tensor:
        """`x`, or the whole tensor of a block in its place."""
        return x if self.block is None else self.block.wholes.get(id(x), x)

    def moves(self, name: str) -> bool:
        """Whether a state tensor leaves its memory: it is sharded, or moves to shared memory."""
        return not self.keeps_whole(name) or self.layout.zero in (1, 2)

    def has_settled(self, x: Tensor) -> bool:
        """Whether `x` is already this run's state, in shards or unchanged."""
        known = self.settled.get(id(x))
        return isinstance(x, DTensor) or (known is not None and known() is x)

    def groups_for(self, used: Iterable[tuple[str, ...]]) -> Groups:
        """The groups over the axes in `used`, and those of other programs; all ranks call together."""
        if self.groups is None:
            self.groups = Groups(dict(self.layout.mesh.axes))
        self.groups.add(used)
        return self.groups

    def device_mesh(self, device: torch.device, pipe_rank: int = 0) -> DeviceMesh:
        """The `DeviceMesh` of the ranks of one pipeline rank, axes ordered as storage splits dims.

        Without an axis `pipe` there is one pipeline rank; of replicas the mesh is this rank's. All ranks ask
        together the first time.
        """
        if not self.meshes:
            mesh = self.layout.stage_mesh
            axes = dtensor_axes(mesh)
            order = [list(mesh).index(a) for a in axes]
            num_meshes = self.layout.axes.get("pipe", 1) * self.layout.num_replicas
            ranks = torch.arange(self.layout.num_ranks).reshape(
                num_meshes, *(n for _, n in mesh.axes)
            )
            for here in ranks:
                named = (here.permute(order), axes) if axes else (here.reshape(1), ("rank",))
                self.meshes.append(DeviceMesh(device.type, named[0], mesh_dim_names=named[1]))
        return self.meshes[self.replica * self.layout.axes.get("pipe", 1) + pipe_rank]

    @property
    def replica(self) -> int:
        """This rank's replica."""
        return replica_here(self.layout.mesh)

    def keeper(self, name: str, pipe_rank: int) -> int:
        """The pipeline rank that keeps a state tensor: `pipe_rank` itself, if it does."""
        owners = self.owners.get(name, frozenset({pipe_rank}))
        return pipe_rank if pipe_rank in owners else min(owners)


def dtensor_axes(mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes in the order in which storage splits a dim, major to minor."""
    return split_order(mesh)


def run_device(model: nn.Module) -> torch.device:
    """The device of the run: the first of a parameter; for a model on the meta device a GPU if any."""
    return device_of(next((p for p in model.parameters() if not p.is_meta), None))


def placements(sharding: Sharding, mesh: Mesh) -> list[Any]:
    """`sharding` as DTensor placements over `dtensor_axes(mesh)`; its dims are in contiguous parts."""
    assert all(len(dim) == 1 for dim in sharding.dims), f"{sharding} has no placements"
    found: list[Any] = []
    for axis in dtensor_axes(mesh):
        at = [d for d, dim in enumerate(sharding.dims) if any(axis in seg.axes for seg in dim)]
        pending = [op for a, op in sharding.partial if a == axis]
        found.append(Shard(at[0]) if at else Partial(pending[0]) if pending else Replicate())
    return found or [Replicate()]


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a state tensor, without autograd."""
    own = held_by(x)
    return own.detach() if own.requires_grad else own


def held_by(x: Tensor) -> Tensor:
    """This rank's part of a state tensor without a detach, for use with gradients off."""
    return local_part(x) if isinstance(x, DTensor) else x


def whole_of(x: Tensor) -> Tensor:
    """All of a tensor, without autograd; for one in shards all its ranks call together."""
    return x.full_tensor() if isinstance(x, DTensor) else x.detach()


def set_local(x: Tensor, value: Tensor) -> None:
    """Set state tensor `x` to `value`."""
    if isinstance(x, DTensor):
        set_local_part(x, value)
    else:
        x.data = value


def is_here(x: Tensor) -> bool:
    """Whether this rank keeps a part of a state tensor; another pipeline rank may have all of it."""
    return not isinstance(x, DTensor) or x.device_mesh.get_coordinate() is not None


def own_memory(state: list[StateTensor]) -> frozenset[str]:
    """The names of the state tensors that share memory with no other: a step may overwrite them."""
    shared = {s.name for both in _overlapping(state) for s in both}
    return frozenset(s.name for s in state) - shared


def refuse_shared_memory(state: list[StateTensor], updated: Collection[str]) -> None:
    """Raise `CaptureError` if a step updates state of which other state is a view."""
    for one, other in _overlapping(state):
        if one.tensor is not other.tensor and {one.name, other.name} & {*updated}:
            raise CaptureError(
                f'"{one.name}" and "{other.name}" share memory, and the step changes it',
                why="the captured step has a value for each of them, and would change one alone",
                fix="a clone of its own for one of them; a view that a module reads may be a property of it",
            )


def _overlapping(state: list[StateTensor]) -> Iterator[tuple[StateTensor, StateTensor]]:
    """Pairs of state tensors whose memory overlaps."""
    ranges = [
        (*_memory(local_of(s.tensor)), k) for k, s in enumerate(state) if not s.tensor.is_meta
    ]
    until, last = 0, -1
    for begin, end, k in sorted(ranges):
        if begin < until:
            yield state[last], state[k]
        if end > until:
            until, last = end, k


def _memory(x: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of `x` and of the end after its last."""
    if not x.numel():
        return x.data_ptr(), x.data_ptr()
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + reach * x.element_size()


def forget_values(state: list[StateTensor]) -> None:
    """Keep names, shapes and dtypes only: entries with whole tensors would keep them alive."""
    state[:] = [replace(s, tensor=torch.empty_like(s.tensor, device="meta")) for s in state]


def settle(
    model: nn.Module,
    optimizer: Any,
    home: Residence,
    device: torch.device,
    seed: int = 0,
    passing: Iterable[Tensor] = (),
) -> None:
    """Replace every state tensor that is still whole by this rank's part, as a DTensor.

    Rank 0 first broadcasts its values, so that replicas start identical. A tensor on the meta device gets
    its initial value here, one module at a time. In place of tensors `passing` the step puts others, so they
    may share memory with the state.
    """
    several = home.layout.num_ranks > 1
    if not several and not is_deferred(model):
        return
    coordinates = home.layout.mesh.coordinates(dist.get_rank() if several else 0)
    state = state_of(model, optimizer)
    check_order([f"state {s.name}: {list(s.tensor.shape)} {s.tensor.dtype}" for s in state])
    replaced: dict[int, Tensor] = {}
    for entry, whole in _deferred(model, optimizer, state, device, seed):
        replaced[id(entry.tensor)] = part_of(entry, whole, home, coordinates, device)
    new = [s.name for s in state if several and not home.has_settled(s.tensor)]
    lodged = home.shared.memory()  # where tutti's own tensors share it
    leaving = [s for s in state if s.name in {*new} and home.moves(s.name)]
    leaving = [s.name for s in leaving if memory_id(s.tensor) not in lodged]
    warn_of_onlookers(state, leaving, passing)
    for entry in state:
        if not several or home.has_settled(entry.tensor) or id(entry.tensor) in replaced:
            continue
        whole = entry.tensor.detach().to(device).contiguous()
        broadcast_first(whole)
        if not home.keeps_whole(entry.name):
            replaced[id(entry.tensor)] = part_of(entry, whole, home, coordinates, device)
        elif whole.data_ptr() != entry.tensor.data_ptr():
            set_local(entry.tensor, whole)
    take_the_place(model, optimizer, home, replaced)
    now = state_of(model, optimizer)
    home.note_optimizers(optimizer)
    # of a tensor in shards a reference would keep PyTorch from giving it another dtype
    kept = [s.tensor for s in now if not isinstance(s.tensor, DTensor)]
    home.settled = {id(x): weakref.ref(x) for x in kept}
    name_shards(now, home)


def take_the_place(
    model: nn.Module, optimizer: Any, home: Residence, replaced: dict[int, Tensor]
) -> None:
    """Put `replaced` in place permanently; references to an old parameter lead to the new one."""
    before = [s.tensor for s in state_of(model, optimizer) if id(s.tensor) in replaced]
    put_in_place(model, optimizer, replaced)
    for old in before:
        new = replaced[id(old)]
        share_tensor_hooks(old, new)
        for key in old.__dict__.keys() - new.__dict__.keys():  # the user's own attributes
            setattr(new, key, getattr(old, key))
        home.renewed[id(old)] = weakref.ref(old), new
        renew(old, partial(home.now, new))


def _has_other_home(shard: StateShard, home: Residence) -> bool:
    """Whether another model has laid this shard out."""
    origin = origin_of(shard)
    known = origin.home() if origin is not None else None
    return known is not None and known is not home


def name_shards(state: list[StateTensor], home: Residence) -> None:
    """Give each shard its origin: its residence, and the name of its state tensor, for its errors."""
    weights = [s.tensor for s in state if s.kind != "slot" and isinstance(s.tensor, StateShard)]
    nbytes = sum(x.numel() * x.element_size() for x in weights)
    for s in state:
        if isinstance(s.tensor, StateShard) and not _has_other_home(s.tensor, home):
            s.tensor.origin = Origin(s.name, nbytes, weakref.ref(home))


def _deferred(
    model: nn.Module,
    optimizer: Any,
    state: list[StateTensor],
    device: torch.device,
    seed: int,
) -> Iterator[tuple[StateTensor, Tensor | Stored]]:
    """Every state tensor on the meta device with its whole initial value, in memory or in a file."""
    if not is_deferred(model):
        return
    entries = {id(s.tensor): s for s in state}
    slots: dict[str, list[StateTensor]] = {}
    for s in state:
        slots.setdefault(s.owner, []).append(s)
    known = {id(s.tensor): s.tensor for s in state if s.tensor.is_meta and s.tensor in STORED}
    values: Iterator[tuple[Tensor, Tensor | Stored]] = chain(
        ((x, STORED[x]) for x in known.values()),
        initial_values(model, seed, device, known),
    )
    for x, whole in values:
        entry = entries[id(x)]
        yield entry, whole
        made = initial_slots(optimizer, x, device) if entry.name in slots else {}
        yield from ((s, made[s.slot]) for s in slots.get(entry.name, ()))


def part_of(
    entry: StateTensor,
    whole: Tensor | Stored,
    home: Residence,
    coordinates: dict[str, int],
    device: torch.device,
) -> Tensor:
    """This rank's part of a state tensor, the replacement of the tensor in `entry`."""
    dtype = entry.tensor.dtype
    if home.layout.num_ranks == 1 or home.keeps_whole(entry.name):
        if not isinstance(whole, Tensor):
            whole = whole.whole().to(device=device, dtype=dtype)
        parameter = isinstance(entry.tensor, nn.Parameter)
        return nn.Parameter(whole, entry.tensor.requires_grad) if parameter else whole
    sharding = home.storage[entry.name]
    here = coordinates.get("pipe", 0)
    keeper = home.keeper(entry.name, here)
    if keeper != here:
        # of a scalar too, as `from_local` takes the global shape of one from its local tensor
        nothing = torch.empty((0,) if sharding.shape else (), dtype=dtype, device=device)
        return as_shard(nothing, sharding, home, device, entry.tensor, keeper)
    mesh = home.layout.stage_mesh
    if not isinstance(whole, Tensor):
        index = [
            sharding.index(d, mesh, coordinates) if any(s.axes for s in dim) else None
            for d, dim in enumerate(sharding.dims)
        ]
        local = whole.part(index).to(device=device, dtype=dtype)
        return as_shard(local, sharding, home, device, entry.tensor, keeper)
    local = sharding.cut(whole, mesh, coordinates)
    if sharding.axes:
        local = local.clone(memory_format=torch.contiguous_format)
    return as_shard(local, sharding, home, device, entry.tensor, keeper)


def as_shard(
    local: Tensor,
    sharding: Sharding,
    home: Residence,
    device: torch.device,
    like: Tensor,
    pipe_rank: int = 0,
) -> Tensor:
    """`local` as this rank's part of a tensor on one pipeline rank; a Parameter if `like` is one."""
    x: Any = DTensor.from_local(
        local,
        home.device_mesh(device, pipe_rank),
        placements(sharding, home.layout.stage_mesh),
        run_check=False,
        shape=torch.Size(sharding.shape),
        stride=_stride(sharding.shape),
    )
    shard = wrap(local, spec_of(x))
    return as_parameter(shard, like.requires_grad) if isinstance(like, nn.Parameter) else shard


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(1, n)
    return tuple(reversed(stride))
