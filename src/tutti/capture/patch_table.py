"""Every attribute of PyTorch, `time` and `math` that a capture replaces while it traces, with the reason.

The replacement is in the file of its concept, which applies a row with `graph.edits.patch.replaced`.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.dlpack
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import distributed_c10d
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler

from tutti.graph.edits import quick
from tutti.graph.edits.patch import Patch, each
from tutti.graph.ops.fused_updates import KERNELS
from tutti.torch_private import default_group
from tutti.torch_private.autograd_engine import ENGINE_RUNS
from tutti.torch_private.fake_tensors import LOG, FakeTensor
from tutti.torch_private.optimizer_marks import CHOICE_OF_SCALER, SCALED_BY_KERNEL
from tutti.torch_private.recurrent import ENTRIES
from tutti.torch_private.selective_checkpoints import CHECK_OF_TRACING
from tutti.torch_private.tracing import PythonKeyTracer
from tutti.torch_private.value_checks import (
    CHECK_OF_ARGUMENTS,
    CHECK_OF_CAUSAL_MASKS,
    CHECK_OF_VALUES,
)

# Notes on nodes: `regions.py`, `second_trace/functional.py`.
NODE_NOTED = Patch(
    PythonKeyTracer, "create_node", "a new node gets its region, line and module", all_threads=True
)
NODE_CARRIED = Patch(
    PythonKeyTracer,
    "create_node",
    "a node of the second trace gets what the first one noted",
    all_threads=True,
)

# Backward: `backwards.py`, `state/gradients.py`, `state/rebound.py`.
_OBSERVED = "observers see where a backward begins and ends"
BACKWARD = tuple(Patch(*run, _OBSERVED) for run in ENGINE_RUNS)
_GRADIENTS = "gradients that an earlier call left are told from those of this one"
GRAD = Patch(Tensor, "grad", _GRADIENTS)
OPTIMIZER_ZERO_GRAD = Patch(Optimizer, "zero_grad", _GRADIENTS)
MODULE_ZERO_GRAD = Patch(nn.Module, "zero_grad", _GRADIENTS)
ZERO = Patch(Tensor, "zero_", _GRADIENTS)
DATA = Patch(Tensor, "data", "`x.data = value` becomes a write that the trace sees")

# Optimizers and models, in `state/`: `fused.py`, `optimizer_copies.py`, `models.py`, `left_modes.py`.
FUSED = each(
    torch,
    (kernel.fused_name for kernel in KERNELS),
    "a fused update is recorded as one op, whose numbers may be symbols",
)
DEEPCOPY = Patch(
    Optimizer, "__deepcopy__", "a copy keeps an optimizer's own attributes", create=True
)
WRAPPERS = tuple(
    Patch(kind, "forward", "a wrapper only calls the module inside it")
    for kind in (DataParallel, DistributedDataParallel)
)
TRAINING = Patch(
    nn.Module, "training", "a step that sets all modes first is one step in any mode", create=True
)

# Other forms of ops: `substitutes/`.
_LOOKUPS = "lookups have dense gradients"
DENSE_EMBEDDING = Patch(torch, "embedding", _LOOKUPS)
DENSE_BAG = Patch(torch, "embedding_bag", _LOOKUPS)
CTC_LOSS = Patch(torch, "ctc_loss", "its backward has shapes that depend on values")
EMBEDDING_BAG = Patch(torch, "embedding_bag", "it is a lookup and a reduction, which can be split")
GAUSSIAN_NLL = Patch(F, "gaussian_nll_loss", "it looks at the values of variances")
ANY = Patch(torch, "any", "`gaussian_nll_loss` is told that no variance is negative")
SETITEM = Patch(Tensor, "__setitem__", "`x[mask] = value` is a choice for each element")
_SCATTERED = "a masked scatter is a choice for each element"
MASKED_SCATTER = (
    Patch(Tensor, "masked_scatter", _SCATTERED),
    Patch(torch, "masked_scatter", _SCATTERED),
)
FLATTEN = Patch(nn.RNNBase, "flatten_parameters", "in a trace weights have no memory to join")
_CUDNN = "without cuDNN, whose ops hide what they write"
BATCH_NORM = Patch(torch, "batch_norm", _CUDNN)
INSTANCE_NORM = Patch(torch, "instance_norm", _CUDNN)
INFERENCE_MODE = each(
    torch.inference_mode, ("__enter__", "__exit__"), "a trace takes no views of tensors made in it"
)
_STEPS = "on a GPU it runs one time step after another, in ops that can be split"
RECURRENT = each(
    ENTRIES,
    ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"),
    _STEPS,
    create=True,
)
CHECK_TENSOR = Patch(*CHECK_OF_VALUES, "a trace has no values to check")
SCALER_SKIPS = Patch(*CHOICE_OF_SCALER, "a scaler asks by a branch whether to skip an update")
SCALER_STEP = Patch(
    GradScaler, "step", "an update that a scaler scales runs without its own skipping"
)
SCALED_UPDATE = Patch(
    *SCALED_BY_KERNEL,
    "of the optimizer that a scaler steps: the branch skips",
)
VALIDATE_ARGS = Patch(*CHECK_OF_ARGUMENTS, "distributions look at values of their arguments")
SELECTIVE = Patch(
    *CHECK_OF_TRACING, "a selective checkpoint recomputes in the trace as it does in eager mode"
)
IS_CAUSAL = Patch(*CHECK_OF_CAUSAL_MASKS, "transformers look at a mask to see whether it is causal")

# Random numbers: `second_trace/random_ops.py`.
RNG_STATES = tuple(
    (
        Patch(owner, "get_rng_state", "checkpointing saves the count of random streams"),
        Patch(owner, "set_rng_state", "checkpointing rewinds the count of random streams"),
    )
    for owner in (torch, torch.random)
)

# Values in Python: `python/host_values.py`, `python/read_values.py`.
NUMPY = each(
    FakeTensor, ("numpy", "__array__"), "a value that NumPy reads is refused with its line"
)
_MEMORY = "memory that another library reads is refused with its line"
DLPACK = (
    Patch(FakeTensor, "__dlpack__", _MEMORY),
    Patch(torch.utils.dlpack, "to_dlpack", _MEMORY),
)
REDUCE = Patch(FakeTensor, "__reduce_ex__", "a value in a pickle is refused with its line")
FORMAT = Patch(FakeTensor, "__format__", "a value in a text is refused with its line")
REPR = Patch(FakeTensor, "__repr__", "a tensor that a user's line prints is warned of", create=True)
_ADDRESS = "a user's line that asks for the address of a tensor is refused"
ADDRESSES = (
    Patch(FakeTensor, "data_ptr", _ADDRESS, create=True),
    Patch(torch.UntypedStorage, "data_ptr", _ADDRESS, create=True),
)
MANUAL_SEED = Patch(torch, "manual_seed", "a step that seeds is refused with its line")
ANOMALY = Patch(torch, "set_anomaly_enabled", "a trace has no values to search for NaN")
TENSOR_OF_TENSORS = Patch(
    torch, "tensor", "a tensor made of a list of tensors is refused with its line"
)
FAKE_LOG = Patch(
    LOG,
    "disabled",
    "it tells each error of a trace once more",
)
_CONVERTED = "a number that is read from a tensor stays a symbol, or is refused with its line"
CONVERSIONS = (
    *each(
        torch.SymFloat, ("__float__", "__int__", "__format__", "__str__", "__repr__"), _CONVERTED
    ).values(),
    *each(
        torch.SymInt, ("__int__", "__index__", "__format__", "__str__", "__repr__"), _CONVERTED
    ).values(),
    *each(torch.SymBool, ("__int__", "__format__", "__str__", "__repr__"), _CONVERTED).values(),
)
FAKE_CONVERSIONS = each(FakeTensor, ("__float__", "__int__", "__index__"), _CONVERTED, create=True)
FAKE_READS = each(
    FakeTensor,
    ("item", "tolist", "__bool__"),
    "a number of a tensor that depends on no input is known",
    create=True,
)
ITEM_MEMO = Patch(
    FakeTensor, "item_memo", "a tensor may be written after a number was read from it"
)

# Numbers as symbols: `python/symbols.py`.
MATH = each(
    math,
    (
        *("sqrt", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin", "atan", "log2"),
        *("exp", "log", "log10", "pow", "fabs", "hypot", "isfinite", "isnan", "isinf"),
    ),
    "functions of `math` take symbols",
)
EQUALITY = each(
    torch.SymFloat, ("__eq__", "__ne__"), "a number compared with itself is asked for NaN"
)
POWERS = each(
    torch.SymFloat, ("__pow__", "__rpow__"), "a power adds no guard that its base is positive"
)
SCHEDULER_FLOAT = Patch(lr_scheduler, "float", "a scheduler's metric may be a symbol", create=True)
HASHES = Patch(torch.SymInt, "__hash__", "a number that is looked up is compared with the keys")
INTEGER_EQUALITY = Patch(
    torch.SymInt, "__eq__", "a lookup's comparison of a number with its key adds no guard"
)
TENSOR_OF_SYMBOLS = each(torch, ("tensor", "as_tensor"), "a tensor may be made of symbols")

# The clock, the system's random bytes and other processes: `python/read_once.py`, `one_process.py`.
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
CLOCKS = each(
    time,
    (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS)),
    "a user's line that reads the clock is warned of",
)
_DRAWN = "a user's line that reads the system's random bytes is warned of"
ENTROPY = (
    Patch(os, "urandom", _DRAWN),
    Patch(random, "_urandom", _DRAWN),
)
_QUERIES = ("get_rank", "get_world_size")
_COLLECTIVES = (
    *("all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("gather", "gather_object", "scatter", "scatter_object_list"),
    *("all_to_all", "all_to_all_single"),
    *("broadcast_object_list", "monitored_barrier", "batch_isend_irecv"),
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"),
    *("all_gather_single", "reduce_scatter_single", "new_group", "get_backend"),
)


def _of_processes() -> Iterator[Patch]:
    for name in (*_QUERIES, *_COLLECTIVES, "all_reduce", "broadcast", "barrier"):
        answer = (
            "the answer is that of one process" if name in _QUERIES else "a collective is refused"
        )
        if name in ("all_reduce", "broadcast", "barrier"):
            answer = "of one process it is nothing, or refused"
        for module in (dist, distributed_c10d):
            if hasattr(distributed_c10d, name) and hasattr(module, name):
                yield Patch(module, name, answer)


PROCESSES = tuple(_of_processes())
DEFAULT_GROUP = Patch(*default_group.DEFAULT_GROUP, "the step sees no process group")


def _flat(*rows: Patch | dict[str, Patch] | tuple[Patch, ...]) -> tuple[Patch, ...]:
    found: list[Patch] = []
    for row in rows:
        found += (
            (row,) if isinstance(row, Patch) else row.values() if isinstance(row, dict) else row
        )
    return tuple(found)


PATCHES = _flat(
    *quick.PATCHES,
    *(NODE_NOTED, NODE_CARRIED),
    *(BACKWARD, GRAD, OPTIMIZER_ZERO_GRAD, MODULE_ZERO_GRAD, ZERO, DATA),
    *(FUSED, DEEPCOPY, WRAPPERS, TRAINING),
    *(DENSE_EMBEDDING, DENSE_BAG, CTC_LOSS, EMBEDDING_BAG, GAUSSIAN_NLL, ANY),
    *(SETITEM, MASKED_SCATTER, CHECK_TENSOR, SCALER_SKIPS, SCALER_STEP, SCALED_UPDATE),
    INFERENCE_MODE,
    *(VALIDATE_ARGS, IS_CAUSAL, *RNG_STATES),
    *(
        NUMPY,
        DLPACK,
        REDUCE,
        FORMAT,
        REPR,
        ADDRESSES,
        MANUAL_SEED,
        ANOMALY,
        TENSOR_OF_TENSORS,
        FAKE_LOG,
    ),
    *(CONVERSIONS, FAKE_CONVERSIONS, FAKE_READS, ITEM_MEMO),
    *(MATH, EQUALITY, POWERS, SCHEDULER_FLOAT, TENSOR_OF_SYMBOLS),
    *(HASHES, INTEGER_EQUALITY),
    *(CLOCKS, *ENTROPY, PROCESSES, DEFAULT_GROUP),
)
