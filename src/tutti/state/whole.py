"""Gathers sharded weights for a block of the user's program, and as a plain state dict.

    enter   gathers every shard; an ordinary parameter takes its place in model and optimizers
    leave   compares the ranks' values; each rank cuts its part, and the shard is back in its place

With `rank` one rank alone holds the wholes, and sends its changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tutti.capture.state.models import module_of
from tutti.capture.state.tensor_attributes import user_attributes
from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.failure import called_alone, naming
from tutti.comm.collectives.group import Group
from tutti.comm.collectives.payload import digest
from tutti.comm.collectives.transport import broadcast_
from tutti.errors import CommError, TuttiError
from tutti.state.only_rank import checked_rank
from tutti.state.replacing import put_in_place
from tutti.state.residence import Residence, WholeBlock, is_here
from tutti.state.residences import residences_of
from tutti.state.shards import StateShard, cut, origin_of
from tutti.torch_private.dtensors import local_part
from tutti.torch_private.module_tables import share_tensor_hooks
from tutti.user_lines import quoted, user_line

_END = "the end of tutti.whole"  # for errors


@dataclass
class _Opened:
    """A shard, the whole tensor in its place, and a record of its first values."""

    name: str
    shard: StateShard
    whole: Tensor | None
    digest: str = ""


@dataclass
class _Entered:
    """A residence in a block: its model, if any, the block around this one, and what this one opened."""

    home: Residence
    model: nn.Module | None
    outer: WholeBlock | None
    opened: list[_Opened]


class Whole:
    """A block in which a model's weights are whole, ordinary tensors.

    Inside, evaluate, generate with, save, read and write `model` as on one device. At the end each rank
    takes over its part of the written values. All ranks enter and leave together. The context manager
    returns whether the weights are whole on this rank. A block that ends in an exception writes nothing.
    A tensor that a rank holds whole anyway stays the same tensor. Blocks of other parts may nest.

    Args:
        model: what a step has laid out, a part of it, a module with such models in it, a dict, list or tuple
            of modules, or a copy made of shards; any other is whole already.
        rank: the only rank with whole weights; by default all. The others take part in the gathering, and
            keep shards.
        slots: the optimizers' slots too, for `optimizer.state_dict()` and `load_state_dict`.

    Raises:
        LayoutError: there is no rank `rank`.
        TuttiError: at the end, if ranks have written different values, with the tensor's name; no rank
            takes over any then. Inside, for a call of a step on the model.
    """

    def __init__(self, model: Any, *, rank: int | None = None, slots: bool = False) -> None:
        self._module, self._rank, self._slots = module_of(model), rank, slots
        self._entered: list[_Entered] = []

    @property
    def nbytes(self) -> int:
        """The block's additional memory beside the shards, on a rank with whole weights."""
        every = [self._shards(*known) for known in residences_of(self._module)]
        return sum(x.numel() * x.element_size() for shards in every for x, _ in shards)

    def __enter__(self) -> bool:
        line, every = quoted(user_line()), residences_of(self._module)
        self._rank = checked_rank(self._rank, [home for _, home in every])
        try:
            found = [self._enter(*known, line) for known in every]
        except BaseException:
            self._put_back()
            raise
        return all(found)

    def _enter(self, model: nn.Module | None, home: Residence, line: str) -> bool:
        """Open the shards of a residence; whether they are whole on this rank."""
        outer = home.block
        if home.fetch is not None and outer is None:
            if self._slots:
                raise _slots_on_servers(line)
            home.fetch()
        if not dist.is_initialized() or home.layout.num_ranks == 1:
            return True
        shards = self._shards(model, home)
        if outer is not None and outer.rank is not None:
            if outer.rank != dist.get_rank():
                raise outer.refused()
            if shards:
                raise outer.refused_inside()
        if outer is not None and not shards:
            return True
        here = self._rank in (None, dist.get_rank())
        entered = _Entered(home, model, outer, [])
        self._entered.append(entered)
        if self._rank is None or self._rank in group_of(home).ranks:
            self._open(entered, shards, here)
        wholes = {id(x.shard): x.whole for x in entered.opened if x.whole is not None}
        around = outer.wholes if outer is not None else {}
        home.block = WholeBlock(line, self._rank, around | wholes)
        return here

    def _open(self, entered: _Entered, shards: list[tuple[StateShard, str]], here: bool) -> None:
        for shard, name in shards:
            full = gathered(shard, entered.home, only=self._rank)
            whole = ordinary(full, shard) if full is not None and here else None
            known = digest(whole) if whole is not None and self._rank is not None else ""
            entered.opened.append(_Opened(name, shard, whole, known))
            if whole is not None:
                share_tensor_hooks(shard, whole)
        opened = [x for x in entered.opened if x.whole is not None]
        self._replace(entered, {id(x.shard): x.whole for x in opened if x.whole is not None})

    def _replace(self, entered: _Entered, replaced: dict[int, Tensor]) -> None:
        put_in_place(self._module, self._optimizers(), replaced)
        if entered.model is not None and entered.model is not self._module:
            put_in_place(entered.model, None, replaced)

    def _put_back(self) -> list[_Entered]:
        """Put all shards back; returns what was open."""
        entered, self._entered = self._entered, []
        for one in reversed(entered):
            one.home.block = one.outer
            self._replace(one, {id(x.whole): x.shard for x in one.opened if x.whole is not None})
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._put_back():
            if kind is None and one.opened:
                with torch.no_grad(), _in(_END, one.home):
                    if self._rank is None:
                        resized = _written_by_all(one.opened, one.home)
                        self._replace(
                            one, {id(x.shard): x.whole for x in resized if x.whole is not None}
                        )
                    else:
                        _written_by_one(one.opened, one.home, self._rank)

    def _shards(self, model: nn.Module | None, home: Residence) -> list[tuple[StateShard, str]]:
        """The shards of this module that a residence keeps, each once, with its name."""
        weights = [*self._module.named_parameters(), *self._module.named_buffers()]
        found = [(x, name) for name, x in weights]
        if self._slots:
            owners = {id(x) for _, x in weights}
            found += [
                (value, slot)
                for one in self._optimizers()
                for group in one.param_groups
                for p in group["params"]
                if id(p) in owners
                for slot, value in one.state.get(p, {}).items()
            ]
        named: dict[int, tuple[StateShard, str]] = {}
        for x, name in found:
            if isinstance(x, StateShard):
                origin = origin_of(x)
                known = origin.home() if origin is not None else None
                # what was computed of shards, and put into a model, has no origin until the next step
                if known is home or (known is None and model is not None):
                    named.setdefault(id(x), (x, origin.name if origin is not None else name))
        return list(named.values())

    def _optimizers(self) -> list[Optimizer]:
        """The optimizers of all steps on this module; models that share a part may share its residence."""
        every = [one for _, home in residences_of(self._module) for one in home.optimizers]
        return list({id(one): one for one in every}.values())


def whole(model: Any, *, rank: int | None = None, slots: bool = False) -> Whole:
    """A block in which the weights of `model` are whole, ordinary tensors, to read or write.

        with tutti.whole(model):
            text = model.generate(prompt)

    Each rank holds the whole model inside: `tutti.whole(model).nbytes` says how many bytes more. All ranks
    enter and leave together, write the same values, and call no step inside.

    Args:
        model: what a step has laid out, a part of it, a module with such models in it, a dict, list or tuple
            of modules, or a copy made of shards; any other is whole already.
        rank: the only rank with whole weights; by default all. The block returns whether this rank has
            them: `with tutti.whole(model, rank=0) as here:`; the others still have shards.
        slots: the optimizers' slots too, for `optimizer.state_dict()`.

    Sharded weights are shards again behind it. A reference to a whole one that is kept past the block is not
    the live weight: steps do not change it, and writes into it are lost.

    Raises:
        LayoutError: there is no rank `rank`.
        TuttiError: at the end, if ranks have written different values, with the tensor's name; no rank
            takes over any then.
    """
    return Whole(model, rank=rank, slots=slots)


def _slots_on_servers(line: str) -> TuttiError:
    return TuttiError(
        "servers keep the slots of the optimizer",
        at=line,
        why="a worker has none, so a block of tutti.whole cannot show or change them",
        fix="step.state_dict() and step.load_state_dict(...), or step.save(path) and step.load(path)",
    )


def model_state(model: Any, *, rank: int | None = None) -> dict[str, Any]:
    """`model.state_dict()` as on one device: whole plain tensors, copies on the CPU.

    Tied weights share memory. It gathers one shard after the other; all ranks call together. With `rank`
    the others get an empty dict. `model` may be anything that `whole` takes. Raises `LayoutError` for a
    rank that there is not.
    """
    module = model if isinstance(model, nn.Module) else module_of(model)
    homes = [home for _, home in residences_of(module)]
    rank = checked_rank(rank, homes)
    for home in homes:
        if home.block is not None and home.block.rank not in (None, dist.get_rank()):
            raise home.block.refused()
        if home.fetch is not None:
            home.fetch()
    several = dist.is_initialized() and any(home.layout.num_ranks > 1 for home in homes)
    here = rank is None or not several or rank == dist.get_rank()
    copies: dict[int, Tensor | None] = {}
    found: dict[str, Any] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor) and id(x) not in copies:
            given = _gathered_of(x, homes, rank) if isinstance(x, StateShard) else x.detach()
            copies[id(x)] = _copy(given, x) if here and given is not None else None
        if here:
            found[name] = copies[id(x)] if isinstance(x, Tensor) else x
    return found


def _gathered_of(x: StateShard, homes: list[Residence], rank: int | None) -> Tensor | None:
    """All of a shard of one of `homes`, on `rank` or on all; None on the others."""
    origin = origin_of(x)
    home = (origin.home() if origin is not None else None) or homes[0]
    if rank is not None and rank not in group_of(home).ranks:
        return None
    return gathered(x, home, only=rank)


def _copy(given: Tensor, of: Tensor) -> Tensor:
    """A copy on the CPU; a gathered tensor is a copy already."""
    return given.to("cpu", copy=not isinstance(of, DTensor))


def group_of(home: Residence) -> Group:
    """The ranks that hold one model together: with replicas, those of this one."""
    axes = tuple(a for a in home.layout.mesh if a != "replica")
    return home.groups_for([axes])[axes]


def gathered(x: Tensor, home: Residence, *, only: int | None = None) -> Tensor | None:
    """A copy of all of a tensor in shards, on every rank that holds the model, or on `only` (else None)."""
    assert isinstance(x, DTensor)
    with _in("the gathering of weights", home, x.numel() * x.element_size()):
        full = x.full_tensor().detach() if is_here(x) else None
        if full is not None and full.data_ptr() == local_part(x).data_ptr():
            full = full.clone()  # each rank of this pipeline rank has all of it
        if "pipe" in home.layout.mesh:
            full = _from_its_pipe_rank(x, full, home)
    return full if only in (None, dist.get_rank()) else None


@contextmanager
def _in(name: str, home: Residence, nbytes: int = 0) -> Iterator[None]:
    """Around collectives of the ranks that hold one model: their errors are `CommError`s."""
    try:
        with naming(name, (), nbytes, group_of(home)):
            yield
    except CommError as error:
        why = "all ranks read and write whole weights together"
        raise called_alone(error, why, quoted(user_line())) from error


def _from_its_pipe_rank(x: DTensor, full: Tensor | None, home: Residence) -> Tensor:
    """Broadcast the tensor of one pipeline rank to all.

    Several may keep it, such as a buffer that several stages read; all ranks choose the same one.
    """
    origin, mesh = origin_of(x), x.device_mesh
    if origin is not None and origin.name in home.owners:
        mesh = home.device_mesh(home.device, home.keeper(origin.name, 0))
    if full is None:
        full = torch.empty(x.shape, dtype=x.dtype, device=local_part(x).device)
    full = full.contiguous()
    broadcast_(full, int(mesh.mesh.flatten()[0]), group_of(home))
    return full


def ordinary(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` as a Parameter if `like` is one, with the user's attributes."""
    is_parameter = isinstance(like, nn.Parameter)
    made = nn.Parameter(whole, requires_grad=like.requires_grad) if is_parameter else whole
    vars(made).update(user_attributes(like))
    return made


def _form(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _refuse_forms(opened: list[_Opened], forms: list[str]) -> None:
    """Raise `TuttiError` on every rank for a whole tensor whose form has changed."""
    for x, form in zip(opened, forms, strict=True):
        if form != _form(x.shard):
            raise TuttiError(
                f'"{x.name}" left the block as {form}',
                why=f"its shards are {_form(x.shard)}; nothing of the block is taken over",
                fix="the same dtype and shape at the end of the block",
            )


def _written_by_all(opened: list[_Opened], home: Residence) -> list[_Opened]:
    """Take over this rank's part of each whole; raises `TuttiError` if ranks have different ones.

    Returns the parameters that have another shape now (`resize_token_embeddings`): they stay whole, and the
    next step lays them out.
    """
    own = [(_form(x.whole), digest(x.whole)) for x in opened if x.whole is not None]
    group = group_of(home)
    texts = exchange_texts(json.dumps(own), group, _END)
    of_ranks = [[tuple(one) for one in json.loads(text)] for text in texts]
    for x, found in zip(opened, zip(*of_ranks, strict=True), strict=True):
        if len(set(found)) > 1:
            other = next(r for r, one in zip(group.ranks, found, strict=True) if one != found[0])
            raise TuttiError(
                f'ranks {group.ranks[0]} and {other} wrote different values into "{x.name}"',
                why="each rank keeps a part of one tensor; nothing of the block is taken over",
                fix="write the same on every rank (one seed), or with step.whole(rank=0) on one",
            )
    resized = [x for x in opened if _is_resized(x)]
    kept = [x for x in opened if not _is_resized(x)]
    _refuse_forms(kept, [_form(x.whole) for x in kept if x.whole is not None])
    for x in kept:
        assert x.whole is not None
        _take(x, x.whole)
        x.shard.requires_grad_(x.whole.requires_grad)
    return resized


def _is_resized(x: _Opened) -> bool:
    same = x.whole is None or x.whole.shape == x.shard.shape or x.whole.dtype != x.shard.dtype
    return isinstance(x.whole, nn.Parameter) and not same


def _written_by_one(opened: list[_Opened], home: Residence, rank: int | None) -> None:
    """Take over this rank's part of the changes of rank `rank`, the only one with wholes."""
    changed = [x.name for x in opened if x.whole is not None and digest(x.whole) != x.digest]
    frozen = [x.name for x in opened if x.whole is not None and not x.whole.requires_grad]
    group = group_of(home)
    forms = [_form(x.whole) for x in opened if x.whole is not None]
    told = exchange_texts(json.dumps([changed, frozen, forms]), group, _END)
    changed, frozen, forms = json.loads(told[group.ranks.index(rank or 0)])
    _refuse_forms(opened, forms)
    for x in opened:
        if isinstance(x.shard, nn.Parameter):
            x.shard.requires_grad_(x.name not in frozen)
        if x.name in changed:
            device = local_part(x.shard).device
            room = torch.empty(x.shard.shape, dtype=x.shard.dtype, device=device)
            value = room if x.whole is None else x.whole.detach().contiguous()
            broadcast_(value, rank or 0, group)
            _take(x, value)


def _take(x: _Opened, value: Tensor) -> None:
    local_part(x.shard).copy_(cut(value.detach(), x.shard))
