"""Checks at the first call that all ranks of a program compute with the same kernels, each on its own GPU.

Each rank computes its own copy of a replicated value (a bias under `tensor`, weights under `data`). PyTorch,
oneDNN and MKL choose kernels by the features of the processor; other kernels round differently, and the
copies drift apart. `torch.randn` of one seed differs, too.
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group
from tutti.comm.host.hosts import host_name
from tutti.errors import CommError

CAPABILITY = "ATEN_CPU_CAPABILITY"
# By this name NCCL tells hosts apart, if it is set.
_HOST = "NCCL_HOSTID"
# The variables that override a library's choice of kernels.
_CHOICES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)


def refuse_unlike(num_programs: int, device: torch.device) -> None:
    """Raise `CommError` on all ranks if the ranks of one program choose different kernels, or if two ranks
    have one GPU.

    All ranks call together. There is no comparison of kernels for a step on another device than a CPU.

    Args:
        num_programs: the run's number of programs, with equally many ranks each.
        device: of this rank's tensors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = [_kernels() if device.type == "cpu" else {}, gpu_name(device)]
    both = [json.loads(text) for text in exchange_texts(json.dumps(own), Group.world())]
    refuse_shared_gpus([gpu for _, gpu in both])
    said = [kernels for kernels, _ in both]
    size = max(1, len(said) // num_programs)
    programs = [said[i : i + size] for i in range(0, len(said), size)]
    if all(kernels == one[0] for one in programs for kernels in one):
        return
    raise CommError(
        "the ranks choose kernels by other features of their processors",
        why="; ".join(f"rank {rank}: {_words(kernels)}" for rank, kernels in enumerate(said))
        + "; what they keep alike would drift apart by rounding",
        fix=f"start all ranks with the same of these variables, such as {CAPABILITY}={_least(said)}",
    )


def gpu_name(device: torch.device) -> str:
    """A name of a GPU that no other one has; "" for another device."""
    if device.type != "cuda":
        return ""
    host = os.environ.get(_HOST) or host_name()
    return f"{torch.cuda.get_device_properties(device).uuid} {host}"


def refuse_shared_gpus(names: list[str]) -> None:
    """Raise `CommError` if two ranks, whose `names` of GPUs these are, have the same GPU."""
    first: dict[str, int] = {}
    for rank, name in enumerate(names):
        if name and name in first:
            raise CommError(
                f"the models of ranks {first[name]} and {rank} lie on one GPU",
                why="collectives of GPUs (NCCL) want one GPU for each rank",
                fix="as many ranks on a host as it has GPUs, and under torchrun, before the model moves, "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); or keep the model on the CPU',
            )
        first[name] = rank


def _kernels() -> dict[str, str]:
    found = {CAPABILITY: torch.backends.cpu.get_cpu_capability()}
    return found | {name: os.environ[name] for name in _CHOICES if name in os.environ}


def _words(kernels: dict[str, str]) -> str:
    return " ".join(f"{k}={v}" for k, v in kernels.items()) or "no CPU"


def _least(said: list[dict[str, str]]) -> str:
    """The lowest capability, in PyTorch's own spelling of the variable."""
    order = ["DEFAULT", "AVX2", "AVX512"]
    found = {kernels.get(CAPABILITY, "DEFAULT") for kernels in said}
    return next((x for x in order if x in found), "default").lower()
