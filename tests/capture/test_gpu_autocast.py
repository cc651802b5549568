"""The dtypes of a GPU's autocast, for a step captured on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from small_steps import step
from tutti.capture.captured import Captured
from tutti.capture.gpu_autocast import gpu_lists
from tutti.capture.step import capture
from tutti.job import Job
from tutti.layout import Layout
from tutti.planning.candidate_programs import CandidatePrograms

aten = torch.ops.aten
OPS = {
    aten.mm.default: torch.bfloat16,
    aten.pow.Tensor_Scalar: torch.float32,
    aten.native_layer_norm.default: torch.float32,
    aten._softmax.default: torch.float32,
    aten.sum.dim_IntList: torch.float32,
    aten.tanh.default: torch.bfloat16,
}


class Mixed(nn.Module):
    """A layer, and what a GPU's autocast computes in float32 after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        found = [
            x.pow(3),
            self.norm(x),
            F.softmax(x, -1),
            torch.tanh(x),
            x + x.sum(1, keepdim=True),
        ]
        return torch.cat([x.float() for x in found])


def made_by(graph: fx.Graph) -> dict[Any, torch.dtype]:
    found: dict[Any, torch.dtype] = {}
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.meta.get("region") == "forward"
            and node.target in OPS
        ):
            val = node.meta["val"]
            found.setdefault(node.target, (val[0] if isinstance(val, list | tuple) else val).dtype)
    return found


def captured(model: nn.Module) -> Captured:
    x, optimizer = torch.randn(4, 8), torch.optim.SGD(model.parameters(), 0.1)
    return capture(step, model, optimizer, (x,), precision="bf16")


def test_what_a_gpu_computes_in_float32() -> None:
    model = Mixed()
    with gpu_lists():
        found = made_by(captured(model).graph)
    assert found == OPS
    assert made_by(captured(model).graph)[aten.pow.Tensor_Scalar] == torch.bfloat16  # as before


@pytest.mark.parametrize(
    ("on_processors", "dtype"), [(True, torch.bfloat16), (False, torch.float32)]
)
def test_programs_of_a_plan(on_processors: bool, dtype: torch.dtype) -> None:
    model = Mixed()
    job = Job.of(step, model, torch.optim.SGD(model.parameters(), 0.1), Layout())
    programs = CandidatePrograms(job, (torch.randn(4, 8),), on_processors=on_processors)
    program = programs.program(Layout.parse("data=2 precision=bf16"))
    assert made_by(program.graph)[aten.pow.Tensor_Scalar] == dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: its autocast not run")
def test_a_gpu_does_so() -> None:
    model, x = Mixed().cuda(), torch.randn(4, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert made_by(capture(step, model, optimizer, (x,), precision="bf16").graph) == OPS
