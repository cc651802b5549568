"""The ops of the zoo's captured steps all have rules, so that nothing is gathered for want of one."""

from __future__ import annotations

import pytest
import torch

from tutti.capture.step import capture
from tutti.rules import TABLE, is_tensor_call, rule_of
from tutti.rules.families.pointwise import is_pointwise
from zoo import CASES

# Every op of every case of the zoo, as captured.
ZOO_OPS = """
aten._log_softmax.default aten._log_softmax_backward_data.default
aten._native_batch_norm_legit_functional.default aten._safe_softmax.default
aten._scaled_dot_product_flash_attention_for_cpu.default
aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten._softmax.default
aten._softmax_backward_data.default aten._to_copy.default aten.abs.default aten.add.Tensor
aten.addcdiv.default aten.addcmul.default aten.addmm.default aten.arange.default
aten.bitwise_and.Tensor aten.bmm.default aten.cat.default aten.clamp.default
aten.constant_pad_nd.default aten.convolution.default aten.convolution_backward.default
aten.cos.default aten.div.Scalar aten.div.Tensor aten.embedding.default
aten.embedding_dense_backward.default aten.eq.Scalar aten.exp.default aten.expand.default
aten.full.default aten.gather.default aten.ge.Scalar aten.ge.Tensor aten.gelu.default
aten.gelu_backward.default aten.gt.Scalar aten.index.Tensor aten.le.Tensor aten.lerp.Scalar
aten.linalg_vector_norm.default aten.log.default aten.logsumexp.default aten.lt.Scalar
aten.masked_fill.Scalar aten.max_pool2d_with_indices.default
aten.max_pool2d_with_indices_backward.default aten.minimum.default aten.mm.default
aten.mul.Scalar aten.mul.Tensor aten.native_batch_norm_backward.default
aten.native_layer_norm.default aten.native_layer_norm_backward.default aten.ne.Scalar
aten.neg.default aten.nll_loss_backward.default aten.nll_loss_forward.default
aten.permute.default aten.pow.Tensor_Scalar aten.reciprocal.default aten.relu.default
aten.reshape.default aten.rsqrt.default aten.select.int aten.select_backward.default
aten.select_scatter.default aten.sigmoid.default aten.sigmoid_backward.default aten.silu.default
aten.silu_backward.default aten.sin.default aten.slice.Tensor aten.slice_backward.default
aten.slice_scatter.default aten.softplus.default aten.softplus_backward.default
aten.sqrt.default aten.stack.default aten.sub.Tensor aten.sum.dim_IntList aten.tanh.default
aten.tanh_backward.default aten.threshold_backward.default aten.tril.default aten.where.self
tutti.adamw.default tutti.draw.default tutti.sgd.default
""".split()  # noqa: SIM905


def _op(name: str) -> object:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


@pytest.mark.parametrize("name", ZOO_OPS)
def test_an_op_of_the_zoo_has_a_rule(name: str) -> None:
    op = _op(name)
    assert op in TABLE or is_pointwise(op)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_each_op_of_a_captured_step_has_a_rule(name: str) -> None:
    step, model, optimizer, batches = CASES[name].build()
    captured = capture(step, model, optimizer, batches[0])
    calls = [n for n in captured.graph.nodes if is_tensor_call(n)]
    assert {str(n.target) for n in calls if rule_of(n) is None} == set()
    assert {str(n.target) for n in calls} <= set(ZOO_OPS), "the list above is not complete"
