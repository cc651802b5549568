"""FSDP2.

As https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html says: `fully_shard` on each repeated
block, then on the model; the optimizer is made after that, on the sharded parameters.
"""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard

from benchmarks.contenders import gloo
from benchmarks.contenders.contender import Batches, Contender, Place
from benchmarks.contenders.eager import Eager
from benchmarks.models import Case, module_names, optimizer


def build(case: Case, place: Place) -> Contender:
    """Each rank has a part of every parameter, and its part of the batch."""
    model, mesh = case.model(), gloo.mesh(place)
    for name in module_names(model, case.blocks):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    batches = Batches(case, place.num_ranks, place.rank, place.num_ranks)
    return Eager(case, model, optimizer(model), batches)
