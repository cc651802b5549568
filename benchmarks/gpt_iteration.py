"""The predicted time of one iteration of a published GPT: pieces, pipeline, gradients, update.

stage      =  its layers' work, and that of the embeddings or of the logits       (costs/graph_seconds.py)
micro      =  1F1B on a clock, messages between stages                            (planner/simulator.py)
gradients  =  an all-reduce over `data`, after the last backward
tied       =  the embeddings' gradient, summed over the first and the last stage
update     =  the bytes of mixed-precision Adam
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpt_pieces import GptShape, pieces_of
from benchmarks.published_iterations import Iteration
from tutti.costs.collective_seconds import RankGroup, collective_seconds, message_seconds
from tutti.costs.graph_seconds import work_seconds
from tutti.hardware.accelerator import Device
from tutti.hardware.topology import Topology
from tutti.pipeline.schedule.schedules import schedule
from tutti.planner.simulator import simulate

VOCABULARY = 50257  # of GPT-2
HALF = 2  # bytes of an element of activations and gradients
# Bytes that mixed-precision Adam moves for a parameter: it reads the float32 weight, gradient and two moments
# (16), writes weight and moments (12), and writes the half weight from the float32 one (4 + 2).
ADAM_NBYTES = 34


@dataclass(frozen=True)
class Runtime:
    """What the published runs did beside the graph.

    recomputes: each layer's forward runs again before its backward.
    pads: the vocabulary is a multiple of 128 for each tensor rank, as Megatron pads it.
    fuses_residual: bias, dropout and residual sum are one kernel.
    chunks: stages of a pipeline rank; more than one are interleaved.
    """

    recomputes: bool
    pads: bool
    fuses_residual: bool
    chunks: int = 1


# Rows of one host are sums over the profile of one layer, which keeps its activations, has 50257 // tensor
# rows of embeddings, and runs in torch 2.0, whose fuser has no dropout; see measured_clusters.md. Rows of
# several hosts are Megatron-DeepSpeed's.
ONE_HOST = Runtime(recomputes=False, pads=False, fuses_residual=False)
SEVERAL_HOSTS = Runtime(recomputes=True, pads=True, fuses_residual=True)


@dataclass(frozen=True)
class Prediction:
    """Seconds of an iteration and of its terms."""

    seconds: float
    terms: dict[str, float]


def predict_iteration(
    row: Iteration, device: Device, topology: Topology, runtime: Runtime | None = None
) -> Prediction:
    """The time of a row's iteration on a device and topology; `runtime` is that of its publication.

    Raises:
        PlanError: the device has no peak of float16.
    """
    default = ONE_HOST if row.on_one_host else SEVERAL_HOSTS
    return _IterationModel(row, device, topology, runtime or default).predict()


class _IterationModel:
    def __init__(
        self, row: Iteration, device: Device, topology: Topology, runtime: Runtime
    ) -> None:
        self.row, self.device, self.topology, self.runtime = row, device, topology, runtime
        self.pieces = pieces_of(
            GptShape(
                row.width,
                row.heads,
                row.sequence,
                _vocabulary(row.tensor, self.runtime.pads),
                row.micro_batch,
                row.tensor,
                self.runtime.fuses_residual,
            )
        )

    def predict(self) -> Prediction:
        """Sum of the terms."""
        row = self.row
        stages = [self._stage(s) for s in range(row.pipe * self.runtime.chunks)]
        computed = self._played(stages)
        busy = [sum(map(sum, stages[rank :: row.pipe])) for rank in range(row.pipe)]
        terms = {
            "micro-batches": row.num_micro * max(busy),
            "gradients": self._gradients(),
            "tied": self._tied(),
            "update": self._update(),
        }
        terms["bubble"] = computed - terms["micro-batches"]
        return Prediction(sum(terms.values()), terms)

    def _seconds(self, piece: str, region: str) -> float:
        groups = {("tensor",): self._group(self.row.tensor, 1)}
        return work_seconds(self.pieces.work[piece, region], self.device, self.topology, groups)

    def _group(self, size: int, stride: int) -> RankGroup:
        """Ranks are in the order of DeepSpeed: tensor ranks are neighbors, then data, then pipe."""
        return RankGroup.strided(size, stride, self.topology.host_size)

    def _stage(self, stage: int) -> tuple[float, float]:
        """Forward and backward of a micro-batch."""
        num_stages = self.row.pipe * self.runtime.chunks
        layers = self.row.layers / num_stages
        forward = layers * self._seconds("layer", "forward")
        backward = layers * self._seconds("layer", "backward")
        if self.runtime.recomputes:
            backward += forward
        for piece in _ends(stage, num_stages):
            forward += self._seconds(piece, "forward")
            backward += self._seconds(piece, "backward")
        return forward, backward

    def _played(self, stages: list[tuple[float, float]]) -> float:
        """1F1B on a clock, interleaved with more than one stage of a rank."""
        if len(stages) == 1:
            return self.row.num_micro * sum(stages[0])
        costs = {
            (s, kind): x
            for s, both in enumerate(stages)
            for kind, x in zip("FB", both, strict=True)
        }
        chunks = self.runtime.chunks
        name = "interleaved" if chunks > 1 else "1f1b"
        played = schedule(name, self.row.pipe, self.row.num_micro, chunks)
        return simulate(played, costs, transfer_seconds=self._message()).seconds

    def _message(self) -> float:
        """Activations to the next stage: tensor ranks send a part each, then gather (DeepSpeed)."""
        row = self.row
        nbytes = HALF * row.micro_batch * row.sequence * row.width
        across = row.tensor * row.data >= self.topology.host_size
        moving = message_seconds(nbytes / row.tensor, self.topology, across_hosts=across)
        group = self._group(row.tensor, 1)
        return moving + collective_seconds("all_gather", nbytes, group, self.topology)

    def _gradients(self) -> float:
        nbytes = HALF * max(self._num_parameters(s) for s in range(self.row.pipe))
        group = self._group(self.row.data, self.row.tensor)
        return collective_seconds("all_reduce", nbytes, group, self.topology)

    def _tied(self) -> float:
        row = self.row
        if row.pipe == 1:
            return 0.0
        nbytes = HALF * _vocabulary(row.tensor, self.runtime.pads) // row.tensor * row.width
        ends = self._group(2, row.tensor * row.data * (row.pipe - 1))
        return collective_seconds("all_reduce", nbytes, ends, self.topology)

    def _update(self) -> float:
        moved = ADAM_NBYTES * max(self._num_parameters(s) for s in range(self.row.pipe))
        return moved / (self.device.bandwidth.value * self.device.memory_efficiency.value)

    def _num_parameters(self, stage: int) -> float:
        """Local parameters of a stage; the last has a copy of the embeddings for the logits."""
        have = self.pieces.num_parameters
        ends = 1 if stage in (0, self.row.pipe - 1) else 0
        return have["layer"] * self.row.layers / self.row.pipe + ends * have["first"]


def _ends(stage: int, pipe: int) -> list[str]:
    return ["first"] * (stage == 0) + ["last"] * (stage == pipe - 1)


def _vocabulary(tensor: int, pads: bool) -> int:
    multiple = 128 * tensor
    return -(-VOCABULARY // multiple) * multiple if pads else VOCABULARY // tensor * tensor
