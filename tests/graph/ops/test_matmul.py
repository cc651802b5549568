"""Matmuls of oneDNN: their values, however operands lie in memory; what they borrow; where they serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from tutti.execution.measure import peak_nbytes
from tutti.graph.analysis.cost import flops_of_call
from tutti.graph.analysis.scratch import borrowed
from tutti.graph.analysis.storage import Storages
from tutti.graph.edits.edit import Editor
from tutti.graph.ops import matmul as module
from tutti.graph.ops.matmul import is_faster, matmul

aten = torch.ops.aten
ONEDNN = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch is built without oneDNN"
)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


# Left operands (.., 32) and right ones (48, 32), by how they lie in memory.
LEFT = {
    "rows": numbers(64, 32),
    "three dims": numbers(4, 16, 32),
    "turned": numbers(32, 64).t(),
    "turned outer dims": numbers(16, 4, 32).transpose(0, 1),
    "columns of more": numbers(64, 100)[:, 3:35],
    "one row for all": numbers(1, 32).expand(64, 32),
    "no row": numbers(0, 32),
}
RIGHT = {
    "rows": numbers(48, 32),
    "turned": numbers(32, 48).t(),
    "columns of more": numbers(48, 100)[:, 10:42],
    "every other row": numbers(96, 32)[::2],
    "every other column": numbers(48, 64)[:, ::2],
    "turned, of more": numbers(32, 100)[:, 5:53].t(),
    "one for all": numbers(1, 32).expand(48, 32),
}
BIASES = {
    "none": None,
    "plain": numbers(48),
    "every other": numbers(96)[::2],
    "one for all": numbers(1).expand(48),
}


@ONEDNN
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("left", LEFT)
def test_the_values_of_linear(left: str, right: str, bias: str) -> None:
    x, weight, b = LEFT[left], RIGHT[right], BIASES[bias]
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    have = matmul(x, weight, b)
    assert have.dtype == torch.float32 and have.is_contiguous()
    torch.testing.assert_close(have.double(), exact, rtol=1e-5, atol=2e-5)


def test_in_float64_it_is_linear() -> None:
    x, weight, b = numbers(4, 5, 6).double(), numbers(7, 6).double(), numbers(7).double()
    assert torch.equal(matmul(x, weight, b), F.linear(x, weight, b))
    assert torch.equal(matmul(x, weight), F.linear(x, weight))


@ONEDNN
def test_what_is_not_finite_stays_so() -> None:
    x = numbers(64, 32)
    x[3, 5], x[7, 1] = float("nan"), float("inf")
    have = matmul(x, RIGHT["rows"].abs())
    assert have[3].isnan().all() and have[7].isinf().all()
    assert have.isfinite().all(1).sum() == 62


def test_its_shape_and_cost_are_known_before_it_runs() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(4, 16, 32), torch.empty(48, 32)
        made = matmul(x, weight)
    assert made.shape == (4, 16, 48) and made.dtype == torch.float32
    want = 2 * 4 * 16 * 48 * 32
    assert flops_of_call(matmul, (x, weight), {}, made) == want
    assert flops_of_call(aten.linear.default, (x, weight), {}, made) == want


@ONEDNN
@pytest.mark.parametrize("turned", (False, True))
def test_memory_beside_the_result(turned: bool) -> None:
    """A transposed left operand is laid out anew; what is borrowed beside that is small."""
    shape = (512, 1024) if turned else (1024, 512)
    mode, graph = FakeTensorMode(), fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    with mode:
        x.meta["val"], weight.meta["val"] = torch.empty(shape), torch.empty(256, 512)
    emit = Editor(graph, mode).at(graph.output(None))
    left = emit(aten.permute.default, x, [1, 0]) if turned else x
    node = emit(matmul, left, weight)
    predicted = borrowed(node, Storages(graph, mode))
    assert predicted == (1024 * 512 * 4 if turned else 0)
    given = numbers(*shape).t() if turned else numbers(*shape)
    right = numbers(256, 512)
    matmul(given, right)
    nbytes, made = peak_nbytes(lambda: matmul(given, right))
    assert abs(nbytes - made.nbytes - predicted) < 2**18


@pytest.mark.filterwarnings("ignore:TF32")  # of leaving `flags`
@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_where_they_are_faster(
    vendor: str, capability: str, faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t\t: 1\n" if vendor else "\n")
    monkeypatch.setattr(module, "_CPU_INFO", told)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    module._vendor.cache_clear()
    try:
        built = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
        assert is_faster() == (faster and built)
        with torch.backends.mkldnn.flags(enabled=False):
            assert not is_faster()
    finally:
        module._vendor.cache_clear()
