"""The ways to train that are compared.

A new one (a pipeline, a parameter server) is a file in `contenders` with `build` and `prepare`, and a line
in `WAYS`.
"""

from __future__ import annotations

from benchmarks.contenders import (
    ddp,
    dtensor,
    eager,
    fsdp2,
    gloo,
    in_step,
    jax_jit,
    torch_pipeline,
    tutti_step,
)
from benchmarks.contenders.contender import Way


def _tutti(layout: str, num_shares: int, peer: str) -> Way:
    return Way(
        name=f"tutti {layout}",
        build=tutti_step.builder(layout, num_shares),
        prepare=tutti_step.prepare,
        num_shares=num_shares,
        needs_tensor="tensor" in layout,
        pipelines="pipe" in layout,
        peer=peer,
    )


WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way(name="one", build=eager.build, prepare=eager.prepare, num_ranks=1, num_shares=1),
        Way(
            name="tutti one", build=tutti_step.builder("", 1), prepare=eager.prepare,
            num_ranks=1, num_shares=1, peer="one",
        ),
        Way(name="one x 2", build=in_step.build, prepare=gloo.prepare, num_shares=1),
        Way(name="ddp", build=ddp.build, prepare=gloo.prepare),
        _tutti("data=2", 2, "ddp"),
        _tutti("data=2 zero=1", 2, "ddp"),
        Way(name="fsdp2", build=fsdp2.build, prepare=gloo.prepare),
        _tutti("data=2 zero=3", 2, "fsdp2"),
        Way(
            name="dtensor", build=dtensor.build, prepare=gloo.prepare, num_shares=1,
            needs_tensor=True,
        ),
        _tutti("tensor=2", 1, "dtensor"),
        Way(
            name="torch 1f1b", build=torch_pipeline.build, prepare=gloo.prepare, num_shares=1,
            pipelines=True,
        ),
        _tutti("pipe=2 micro=8", 1, "torch 1f1b"),
        _tutti("pipe=2 micro=8 schedule=zb", 1, "torch 1f1b"),
        Way(
            name="jax", build=jax_jit.build, prepare=jax_jit.prepare, num_ranks=1,
            devices_per_process=jax_jit.NUM_DEVICES,
        ),
    )
}  # fmt: skip
