"""Kernels and collectives of captured and partitioned steps, counted and costed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import step as usual_step
from tutti.capture.captured import copied
from tutti.capture.step import capture
from tutti.costs.collective_seconds import RankGroup, collective_seconds
from tutti.costs.graph_seconds import GraphWork, work_of, work_seconds
from tutti.costs.kernel_seconds import kernel_seconds
from tutti.costs.kernels import ATTENTION, BATCH_NORM, CONVOLUTION, DeviceKernel
from tutti.graph.ops.fused_updates import BY_OP
from tutti.hardware import catalog
from tutti.hardware.figures import Figure
from tutti.layout import Layout
from tutti.partition.partition import partition
from tutti.propagate.plan import plan

A100 = catalog.device("a100-80gb")
TOPOLOGY = catalog.topology("dgx-a100")
MEMORY = A100.bandwidth.value * A100.memory_efficiency.value


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + 2 * torch.sigmoid(
            self.down(hidden * torch.tanh(hidden)).view(-1, x.shape[-1]) + 1
        )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def work(
    layout: str = "data=1", *, fused: bool = True, width: int = 64, rows: int = 32
) -> GraphWork:
    with torch.device("meta"):
        model = Perceptron(width)
        x = torch.empty(rows, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = capture(train_step, model, optimizer, (x, x))
    planned = plan(copied(captured), Layout.parse(layout), {"up.weight": "tensor, -"})
    return work_of(partition(planned).graph, fused=fused)


def forward_of(found: GraphWork) -> list[DeviceKernel]:
    return [k for k in found.kernels if k.node.meta.get("region") == "forward"]


def name_of(kernel: DeviceKernel) -> str:
    return kernel.node.target.overloadpacket.__name__  # type: ignore[union-attr]


def test_the_kernels_of_a_forward() -> None:
    """A norm, two matmuls, one kernel for `h * tanh(h)`, one for the rest, with the loss."""
    kernels = forward_of(work())
    assert [name_of(k) for k in kernels][:3] == ["native_layer_norm", "addmm", "mul"]
    assert [(m.m, m.n, m.k) for k in kernels if (m := k.matmul)] == [(32, 128, 64), (32, 64, 128)]
    product = kernels[2]
    assert len(product.nodes) == 2  # tanh and the product
    x = 32 * 128 * 4
    # Reads h; writes tanh(h) for the backward, and the product.
    assert (product.read_nbytes, product.written_nbytes) == (x, 2 * x)


def test_without_fusion_each_op_is_a_kernel() -> None:
    apart = forward_of(work(fused=False))
    assert all(len(k.nodes) == 1 for k in apart)
    together = forward_of(work())
    assert sum(len(k.nodes) for k in together) == len(apart) > len(together)
    assert sum(k.nbytes for k in together) < sum(k.nbytes for k in apart)
    assert [k.matmul for k in together if k.matmul] == [k.matmul for k in apart if k.matmul]


def test_the_backward_of_a_norm_reads_twice() -> None:
    (norm,) = [k for k in work().kernels if "native_layer_norm_backward" in str(k.node.target)]
    assert norm.num_launches == 2
    values = sum(s.meta["val"].nbytes for s in norm.node.all_input_nodes)
    assert norm.read_nbytes == 2 * values


def test_matmuls_have_the_flops_of_the_step() -> None:
    """2 m n k for each of 2 matmuls forward; twice that backward."""
    total = sum(k.matmul.flops for k in work().kernels if k.matmul)
    assert total == 3 * 2 * (2 * 32 * 64 * 128)


def test_tensor_ranks_share_the_matmuls_and_sum() -> None:
    found = work("tensor=4")
    total = sum(k.matmul.flops for k in found.kernels if k.matmul)
    assert total == 3 * 2 * (2 * 32 * 64 * 128) / 4
    large = [c for c in found.calls if c.nbytes == 32 * 64 * 4]
    assert [(c.kind, c.axes) for c in large] == [
        ("all_reduce", ("tensor",))
    ] * 2  # forward, backward


def test_the_time_of_a_graph_is_the_sum() -> None:
    found = work("tensor=4")
    groups = {("tensor",): RankGroup(4, 4)}
    kernels = [kernel_seconds(k, A100) for k in found.kernels]
    calls = [collective_seconds(c.kind, c.nbytes, RankGroup(4, 4), TOPOLOGY) for c in found.calls]
    expected = sum(kernels) + sum(calls) + len(calls) * A100.host_seconds.value
    assert work_seconds(found, A100, TOPOLOGY, groups) == pytest.approx(expected)
    alone = work_seconds(found, A100, TOPOLOGY, {("tensor",): RankGroup(1, 1)})
    assert alone == pytest.approx(sum(kernels))


def test_small_kernels_wait_for_the_host_large_ones_do_not() -> None:
    small, large = forward_of(work())[2], forward_of(work(width=4096, rows=8192))[2]
    assert kernel_seconds(small, A100) == A100.host_seconds.value
    assert kernel_seconds(small, A100, eager=False) == pytest.approx(5e-6 + small.nbytes / MEMORY)
    assert kernel_seconds(large, A100) == kernel_seconds(large, A100, eager=False)
    assert kernel_seconds(large, A100) == pytest.approx(5e-6 + large.nbytes / MEMORY)


def test_a_graph_without_launches_is_as_fast_as_its_parts() -> None:
    found, slow = work(), replace(A100, host_seconds=Figure(1e-4, "of this test"))
    eager = work_seconds(found, slow, TOPOLOGY, {})
    launches = 1e-4 * sum(k.num_launches for k in found.kernels)
    updates = [k for k in found.kernels if not k.num_launches]  # many parameters in one kernel
    assert {k.node.target for k in updates} <= set(BY_OP) and updates
    joined = sum(kernel_seconds(k, slow) for k in updates)
    assert eager == pytest.approx(launches + joined)
    slower = replace(A100, host_seconds=Figure(2e-4, "of this test"))
    assert work_seconds(found, slower, TOPOLOGY, {}) == pytest.approx(2 * launches + joined)
    assert work_seconds(found, slow, TOPOLOGY, {}, eager=False) < eager


def test_rows_that_no_load_divides() -> None:
    """A result of 33 half-precision columns: rows of 66 bytes."""
    shapes = {}
    for columns in (32, 33):
        with torch.device("meta"):
            model = nn.Linear(16, columns, bias=False).half()
            x, y = torch.empty(8, 16).half(), torch.empty(8, columns).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = capture(train_step, model, optimizer, (x, y))
        kernels = forward_of(work_of(captured.graph))
        shapes[columns] = next(k.matmul for k in kernels if k.matmul)
    assert shapes[32].aligned_nbytes == 16 and shapes[33].aligned_nbytes == 2


def attention_kernel(causal: bool) -> DeviceKernel:
    """Of queries, keys and values of 2 samples, 4 heads, 256 tokens and 64 features."""
    q = torch.empty(2, 4, 256, 64, dtype=torch.bfloat16, device="meta")

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=causal)

    graph = capture(step, nn.Linear(1, 1), None, (q,)).graph
    (found,) = [k for k in work_of(graph).kernels if k.kind == ATTENTION]
    return found


def test_causal_attention_computes_half_of_the_pairs_at_its_own_share_of_the_peak() -> None:
    whole, half = attention_kernel(False), attention_kernel(True)
    assert whole.flops == 2 * half.flops == 2 * 2 * 2 * 4 * 256 * 256 * 64
    assert A100.attention_efficiency is not None
    wide = replace(A100, bandwidth=replace(A100.bandwidth, value=1e20))
    rate = A100.peak_of(torch.bfloat16) * A100.attention_efficiency.value
    expected = A100.kernel_seconds.value + half.flops / rate
    assert kernel_seconds(half, wide, eager=False) == pytest.approx(expected)
    plain = replace(wide, attention_efficiency=None)
    rate = A100.peak_of(torch.bfloat16) * A100.matmul_efficiency.value
    expected = A100.kernel_seconds.value + half.flops / rate
    assert kernel_seconds(half, plain, eager=False) == pytest.approx(expected)


def kernels_of_a_convolution(channels: int) -> dict[str, DeviceKernel]:
    """A convolution from 3 channels and a batch norm, on 2 images of 32 by 32: by kind and region."""
    convolution = nn.Conv2d(3, channels, 3, padding=1, bias=False)
    model = nn.Sequential(convolution, nn.BatchNorm2d(channels))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    graph = capture(usual_step, model, optimizer, (torch.empty(2, 3, 32, 32),)).graph
    return {f"{k.kind} {k.node.meta['region']}": k for k in work_of(graph).kernels if k.kind}


def test_convolutions_have_their_own_share_of_the_peak() -> None:
    found = kernels_of_a_convolution(4)[f"{CONVOLUTION} forward"]
    slow = replace(
        A100,
        convolution_efficiency=Figure(0.1, "test"),
        bandwidth=replace(A100.bandwidth, value=1e20),
    )
    assert found.flops == 2 * 2 * 4 * 32 * 32 * 3 * 9
    expected = A100.kernel_seconds.value + found.flops / (0.1 * A100.peak_of(torch.float32))
    assert kernel_seconds(found, slow, eager=False) == pytest.approx(expected)


@pytest.mark.parametrize(("channels", "blocks"), [(4, 4), (1024, 2 * 108)])
def test_a_batch_norm_adds_up_a_channel_in_a_block(channels: int, blocks: int) -> None:
    """A block a channel, and two blocks at a time on each of an A100's 108 processors."""
    device = replace(A100, batch_norm_rate=Figure(1e9, "test"))
    found = kernels_of_a_convolution(channels)
    forward, backward = (found[f"{BATCH_NORM} {region}"] for region in ("forward", "backward"))
    gap, nbytes = A100.kernel_seconds.value, 4 * 2 * channels * 32 * 32
    sums = nbytes / (1e9 * blocks)
    rate = A100.bandwidth.value * A100.memory_efficiency.value
    assert kernel_seconds(forward, device, eager=False) == pytest.approx(
        gap + sums + forward.nbytes / rate, rel=1e-2
    )
    assert kernel_seconds(backward, device, eager=False) == pytest.approx(
        gap + 2.35 * sums, rel=1e-2
    )
    plain = kernel_seconds(backward, A100, eager=False)
    assert plain == pytest.approx(gap + backward.nbytes / rate)
