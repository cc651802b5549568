"""Imports, and a first step, that every rank and command of a test would otherwise do for itself.

Where a process can be forked safely, one imports this module for all, and the ranks are its copies. What is
missing here a rank imports when it needs it. The first capture of a process takes three times as long as the
next one: PyTorch and tutti look up each op once.
"""

import encodings.idna  # noqa: F401
import gc
import inspect
import os
import warnings
import weakref

import hypothesis  # noqa: F401
import matplotlib.figure  # noqa: F401
import pydantic.type_adapter  # noqa: F401
import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401
import sympy.tensor.tensor  # noqa: F401
import torch
import torch.utils.serialization
import transformers.models.llama.modeling_llama  # noqa: F401
import typer._adapters  # noqa: F401

import small_steps
import tutti.api
import tutti.cli.main
import tutti.launch.launch
import tutti.launch.ranks
import tutti.launch.supervise
import tutti.report.page.page
import tutti.resuming.run_checkpoints  # noqa: F401
import zoo_models
from tutti.execution import collector


def first_step() -> None:
    """A step of a GPT, on one device and on two, which leaves random numbers and warnings as they were."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        gpt = zoo_models.GPT(seq=4, dim=8, num_heads=2, num_layers=1, dropout=0.1)
        small_steps.same_step(
            lambda model, tokens: model(tokens).log_softmax(-1).mean(),
            gpt,
            torch.optim.AdamW(gpt.parameters()),
            (torch.zeros(4, 4, dtype=torch.long),),
            "",
            "data=2 zero=3",
        )


# A build with CUDA starts threads of autograd at the first backward, and a copy may then take no other.
if not torch.backends.cuda.is_built():
    first_step()
# What PyTorch would take out of its own tables at the end of each copy: a hundredth of a second.
for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    if (alive := one.peek()) and alive[1] is torch.library._del_library:
        one.detach()
inspect.stack()  # torch's elastic agent asks for it, and the first call reads where every module lies
gc.collect()
gc.freeze()  # a collector that visits an object copies its page
collector._is_frozen()  # a copy knows it, and counts no objects
# Its own path was put before the path of the test.
_, _, os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)
