"""JAX: `jit` over as many host devices as there are ranks, in one process.

As https://docs.jax.dev/en/latest/sharded-computation.html says: the batch lies along a mesh axis, weights on
every device, and the compiler inserts the collectives. Weights and moments are donated, so they are updated
in place. AdamW is written out, with torch's formula.
"""

# pyright: reportMissingImports=false
# JAX is a peer that only `make bench` installs.
from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import eager
from benchmarks.contenders.contender import Batches, Contender, Missing, Place
from benchmarks.models import BETAS, EPS, LR, WEIGHT_DECAY, Case

if TYPE_CHECKING:
    from benchmarks.contenders.jax_models import Loss

NUM_DEVICES = 2


def prepare(place: Place) -> None:
    """Make the host devices, and import JAX: the flag counts only before."""
    eager.prepare(place)
    if importlib.util.find_spec("jax") is None:
        raise Missing("jax is not installed: pip install -e '.[bench]'")
    flag = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    found = len(jax.devices())
    assert found == NUM_DEVICES, f"{found} host devices instead of {NUM_DEVICES}"
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))


class Jitted:
    """The compiled step, its state on the devices, its batches."""

    def __init__(self, train_step: Any, state: Any, batches: list[Any]) -> None:
        self.train_step, self.state, self.batches = train_step, state, batches
        self.count = 0

    def step(self) -> float:
        """See `Contender`; the loss is that of the global batch."""
        import jax

        self.state, loss = self.train_step(self.state, *self.batches[self.count])
        jax.block_until_ready(self.state)
        self.count = (self.count + 1) % len(self.batches)
        return float(loss)


def adamw(weights: Any, grads: Any, moments: tuple[Any, Any], count: Any) -> tuple[Any, Any]:
    """One update of `torch.optim.AdamW`; `count` is the number of this step, from 1."""
    import jax
    import jax.numpy as jnp

    beta1, beta2 = BETAS
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, moments[1], grads)
    size, root = LR / (1 - beta1**count), jnp.sqrt(1 - beta2**count)

    def new(w: Any, m: Any, v: Any) -> Any:
        return w * (1 - LR * WEIGHT_DECAY) - size * m / (jnp.sqrt(v) / root + EPS)

    return jax.tree.map(new, weights, first, second), (first, second)


def step_of(loss: Loss) -> Any:
    """`(state, inputs, targets) -> (state, loss)`, compiled at its first call."""
    import jax

    def train_step(state: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
        weights, moments, running, count = state
        found, grads = jax.value_and_grad(loss, has_aux=True)(weights, running, inputs, targets)
        value, running = found
        weights, moments = adamw(weights, grads, moments, count + 1)
        return (weights, moments, running, count + 1), value

    return jax.jit(train_step, donate_argnums=0)


def build(case: Case, _place: Place) -> Contender:
    """Weights on all devices, batches split over them."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks.contenders.jax_models import arrays, inputs_of, loss_of

    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    weights, running = arrays(case.model())
    moments = tuple({name: np.zeros_like(x) for name, x in weights.items()} for _ in range(2))
    state = jax.device_put((weights, moments, running, np.float32(0)), whole)
    batches = [
        jax.device_put((inputs_of(x), y.numpy().astype(np.int32)), split)
        for x, y in Batches(case, NUM_DEVICES).all()
    ]
    return Jitted(step_of(loss_of(case)), state, batches)
