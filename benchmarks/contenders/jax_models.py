"""The models of the benchmark in JAX: the loss of each as a function of its weights.

Weights keep their names; those of linear layers are stored `[in, out]` and those of convolutions
`[height, width, in, out]`, images as `[batch, height, width, channels]`, as JAX likes them.
"""

# pyright: reportMissingImports=false
# JAX is a peer that only `make bench` installs.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import Tensor, nn

from benchmarks.models import Case, GPTCase, LlamaCase, ResNetCase

Weights = dict[str, Any]
Statistics = dict[str, Any]
# (weights, running statistics, inputs, targets) -> (loss, running statistics)
Loss = Callable[[Weights, Statistics, Any, Any], tuple[Any, Statistics]]


def arrays(model: nn.Module) -> tuple[Weights, Statistics]:
    """The weights and running statistics of a torch model, as numpy arrays in JAX's layouts."""
    weights = {name: _array(p) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if isinstance(module, nn.Linear):
            weights[key] = np.ascontiguousarray(weights[key].T)
        elif isinstance(module, nn.Conv2d):
            weights[key] = np.ascontiguousarray(weights[key].transpose(2, 3, 1, 0))
    running = {name: _array(b) for name, b in model.named_buffers() if "running" in name}
    return weights, running


def _array(x: Tensor) -> Any:
    return np.array(x.detach().numpy())


def inputs_of(inputs: Tensor) -> Any:
    """Tokens as 32-bit integers, images with their channels last."""
    x = inputs.numpy()
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x.astype(np.int32)


def loss_of(case: Case) -> Loss:
    """The loss function of a case."""
    match case:
        case GPTCase():
            return _gpt(case)
        case LlamaCase():
            return _llama(case)
        case ResNetCase():
            return _resnet(case)
    raise TypeError(f"no JAX model for {type(case).__name__}")


def _cross_entropy(logits: Any, targets: Any) -> Any:
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1).mean()


def _linear(w: Weights, name: str, x: Any) -> Any:
    y = x @ w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _layer_norm(w: Weights, name: str, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def _heads(x: Any, head_dim: int) -> Any:
    return x.reshape(*x.shape[:-1], -1, head_dim)


def _attention(q: Any, k: Any, v: Any) -> Any:
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(*out.shape[:-2], -1)


def _gpt(case: GPTCase) -> Loss:
    def block(w: Weights, name: str, x: Any) -> Any:
        y = _layer_norm(w, f"{name}.norm1", x)
        q, k, v = (_heads(_linear(w, f"{name}.{p}", y), case.head_dim) for p in "qkv")
        x = x + _linear(w, f"{name}.o", _attention(q, k, v))
        y = _linear(w, f"{name}.up", _layer_norm(w, f"{name}.norm2", x))
        return x + _linear(w, f"{name}.down", jax.nn.gelu(y, approximate=False))

    def loss(w: Weights, running: Statistics, tokens: Any, targets: Any) -> tuple[Any, Statistics]:
        x = w["embed.weight"][tokens] + w["position.weight"][: tokens.shape[1]]
        for i in range(case.depth):
            x = block(w, f"blocks.{i}", x)
        logits = _linear(w, "head", _layer_norm(w, "norm", x))
        return _cross_entropy(logits, targets), running

    return loss


def _rms_norm(w: Weights, name: str, x: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]


def _rotated(x: Any) -> Any:
    """Rotary positions, base 10000; x is [batch, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-np.arange(half, dtype=np.float32) / half)
    angle = np.arange(x.shape[1], dtype=np.float32)[:, None, None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _llama(case: LlamaCase) -> Loss:
    def block(w: Weights, name: str, x: Any) -> Any:
        y = _rms_norm(w, f"{name}.input_layernorm", x)
        q, k, v = (
            _heads(_linear(w, f"{name}.self_attn.{p}_proj", y), case.head_dim) for p in "qkv"
        )
        heads = _attention(_rotated(q), _rotated(k), v)
        x = x + _linear(w, f"{name}.self_attn.o_proj", heads)
        y = _rms_norm(w, f"{name}.post_attention_layernorm", x)
        gate = jax.nn.silu(_linear(w, f"{name}.mlp.gate_proj", y))
        return x + _linear(w, f"{name}.mlp.down_proj", gate * _linear(w, f"{name}.mlp.up_proj", y))

    def loss(w: Weights, running: Statistics, tokens: Any, targets: Any) -> tuple[Any, Statistics]:
        x = w["model.embed_tokens.weight"][tokens]
        for i in range(case.depth):
            x = block(w, f"model.layers.{i}", x)
        logits = _linear(w, "lm_head", _rms_norm(w, "model.norm", x))
        return _cross_entropy(logits, targets), running

    return loss


class _Convolutions:
    """Convolution and BatchNorm layers of one forward pass; keeps the new running statistics."""

    def __init__(self, w: Weights, running: Statistics) -> None:
        self.w, self.running = w, dict(running)

    def __call__(self, name: str, x: Any, stride: int = 1) -> Any:
        kernel = self.w[f"{name}.convolution.weight"]
        pad = (kernel.shape[0] // 2,) * 2
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), (pad, pad), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return self._normalized(f"{name}.normalization", x)

    def _normalized(self, name: str, x: Any, momentum: float = 0.1) -> Any:
        mean, count = x.mean((0, 1, 2)), x.size // x.shape[-1]
        variance = ((x - mean) ** 2).mean((0, 1, 2))
        for key, new in (("mean", mean), ("var", variance * (count / (count - 1)))):
            old = self.running[f"{name}.running_{key}"]
            self.running[f"{name}.running_{key}"] = old + momentum * (new - old)
        scale = self.w[f"{name}.weight"] * jax.lax.rsqrt(variance + 1e-5)
        return (x - mean) * scale + self.w[f"{name}.bias"]


def _resnet(case: ResNetCase) -> Loss:
    def layer(conv: _Convolutions, name: str, x: Any, stride: int) -> Any:
        y = jax.nn.relu(conv(f"{name}.layer.0", x, stride))
        y = conv(f"{name}.layer.1", y)
        if f"{name}.shortcut.convolution.weight" in conv.w:
            x = conv(f"{name}.shortcut", x, stride)
        return jax.nn.relu(x + y)

    def loss(w: Weights, running: Statistics, images: Any, targets: Any) -> tuple[Any, Statistics]:
        conv = _Convolutions(w, running)
        x = jax.nn.relu(conv("resnet.embedder.embedder", images, 2))
        around = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)
        for i, depth in enumerate(case.depths):
            for j in range(depth):
                stride = 2 if i and not j else 1
                x = layer(conv, f"resnet.encoder.stages.{i}.layers.{j}", x, stride)
        logits = _linear(w, "classifier.1", x.mean((1, 2)))
        return _cross_entropy(logits, targets), conv.running

    return loss
