"""DistributedDataParallel.

As https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html says:
gradients as views of the buckets (no second copy of them), and a static graph, since every step uses the
same parameters.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.contender import Batches, Contender, Place
from benchmarks.contenders.eager import Eager
from benchmarks.models import Case, optimizer


def build(case: Case, place: Place) -> Contender:
    """Each rank has the model and its part of the batch."""
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True, static_graph=True)
    batches = Batches(case, place.num_ranks, place.rank, place.num_ranks)
    return Eager(case, model, optimizer(model), batches)
