"""`attention_memory`: the backward of a GPU's kernel gets the forward's result in the forward's memory."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from pass_programs import attention
from tutti.passes.attention_memory import BACKWARD, FORWARD, attention_memory


def operand(graph: fx.Graph) -> Tensor:
    (backward,) = (n for n in graph.nodes if n.target is BACKWARD)
    out: Any = backward.args[5]
    return out.meta["val"]


def test_a_result_from_elsewhere_is_laid_out() -> None:
    graph = attention()
    assert operand(graph).is_contiguous()
    assert attention_memory(graph) == 1
    laid: Tensor = operand(graph)
    assert laid.transpose(1, 2).is_contiguous() and not laid.is_contiguous()
    assert attention_memory(graph) in (0, 1)  # again it would copy nothing
    graph.lint()


def test_the_result_of_the_forward_stays() -> None:
    graph = attention()
    (backward,) = (n for n in graph.nodes if n.target is BACKWARD)
    q, k, v = backward.args[1:4]
    with graph.inserting_before(backward):
        both = graph.call_function(FORWARD, (q, k, v, None, True))
        backward.update_arg(5, graph.call_function(operator.getitem, (both, 0)))
    before = len(graph.nodes)
    assert attention_memory(graph) == 0 and len(graph.nodes) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: its kernel not run")
def test_the_kernel_reads_no_other_memory() -> None:
    """The reason for the pass: the same values with other strides give other gradients."""
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 6, 64, 16, device="cuda", dtype=torch.float16)
    out, *rest = FORWARD(q, k, v, None, True)
    right = BACKWARD(grad, q, k, v, None, out, *rest, 0.0, [True, True, True, False])[0]
    copied = out.contiguous()
    laid = copied.transpose(1, 2).contiguous().transpose(1, 2)
    again = BACKWARD(grad, q, k, v, None, laid, *rest, 0.0, [True, True, True, False])[0]
    torch.testing.assert_close(again, right)
