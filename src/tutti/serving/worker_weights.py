"""Keeps the servers' weights on a worker's ranks: each keeps its part, behind the user's tensors.

    servers -> buffer for a whole weight, on the first rank -> on every rank -> its part

A rank with all of a weight receives it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.capture.state.lift import StateTensor, create_slots, optimizers_of, state_of
from tutti.job import Job
from tutti.layout import Sharding
from tutti.partition.partition import Program
from tutti.propagate.storage_sharding import slot_like
from tutti.server.protocol.update import ServedVariable
from tutti.server.wire.worker_ranks import WorkerRanks
from tutti.state.residence import Residence, as_shard, local_of, run_device, set_local, settle
from tutti.state.residences import residence_of


class WorkerWeights:
    """The weights of a worker on one of its ranks; all `worker_ranks` call together."""

    def __init__(self, job: Job, worker_ranks: WorkerRanks) -> None:
        self.job, self.worker_ranks = job, worker_ranks

    @cached_property
    def home(self) -> Residence:
        """The residence of the worker's state."""
        return residence_of(self.job.model, self.job.layout)

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinates in its worker."""
        return self.home.layout.mesh.coordinates(self.worker_ranks.rank)

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return {s.name: s.tensor for s in state_of(self.job.model, None)}

    def settle(self, program: Program) -> None:
        """Cut weights and buffers down to this rank's parts; those not in the program stay whole."""
        home = self.home
        home.device = run_device(self.job.model)
        home.compute.update(program.plan.compute)
        for name, x in self.state.items():
            whole = Sharding.whole(tuple(x.shape))
            home.storage.setdefault(name, program.storage.get(name, whole))
        settle(self.job.model, self.job.optimizer, home, home.device, self.job.seed)

    def rooms(self, state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Buffers for whole weights of `state`: the model's own tensor if this rank has all of it."""
        found = {}
        for name in names:
            x = local_of(state[name])
            here = x.shape == state[name].shape and x.is_contiguous()
            found[name] = x if here else torch.empty(state[name].shape, dtype=x.dtype)
        return found

    def take(self, state: Mapping[str, Tensor], rooms: Mapping[str, Tensor]) -> None:
        """Distribute the first rank's received weights: each rank takes its part."""
        for name, whole in rooms.items():
            self.worker_ranks.share(whole)
            own = local_of(state[name])
            if whole.data_ptr() != own.data_ptr():
                own.copy_(self._part(name, whole))

    def put(self, s: StateTensor, whole: Tensor) -> None:
        """Set a state tensor to this rank's part of `whole`, which all ranks have."""
        if isinstance(s.tensor, DTensor):
            whole = self._part(s.name, whole).clone(memory_format=torch.contiguous_format)
        set_local(s.tensor, whole.to(s.tensor.device))

    def _part(self, name: str, whole: Tensor) -> Tensor:
        return self.home.storage[name].cut(whole, self.home.layout.stage_mesh, self.coordinates)

    def make_slots(self, variables: Iterable[ServedVariable]) -> None:
        """Make the optimizer's slots without values; on several ranks each makes its part."""
        if self.worker_ranks.size == 1:
            return create_slots(self.job.optimizer)
        names = {id(x): name for name, x in self.state.items()}
        slots = {v.name: v.slots for v in variables}
        for one in optimizers_of(self.job.optimizer):
            for p in (p for g in one.param_groups for p in g["params"]):
                owner = names[id(p)]
                for slot, (shape, dtype) in slots.get(owner, {}).items():
                    one.state[p][slot] = self._slot(owner, slot, shape, dtype)

    def _slot(self, owner: str, slot: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        name, home = f"optim.{owner}.{slot}", self.home
        home.storage.setdefault(name, slot_like(home.storage[owner], shape))
        own = self._part(name, torch.zeros(shape, dtype=dtype, device=home.device)).contiguous()
        if home.keeps_whole(name):
            return own
        return as_shard(own, home.storage[name], home, home.device, own)

    def forget_slots(self) -> None:
        """Drop the optimizer's slots, which the servers keep."""
        for one in optimizers_of(self.job.optimizer):
            one.state.clear()
