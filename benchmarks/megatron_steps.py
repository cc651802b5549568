"""Megatron-LM's published steps of GPTs of 22 billion to a trillion parameters against the cost model.

    python -m benchmarks.megatron_steps

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, tables
3 and 5: seconds of an iteration with full recomputation, sequences of 2048, fp16, A100 80 GB on hosts with 8
adapters, `tensor=8`. No constant is fitted to these rows.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.command_line import parser
from benchmarks.gpt_iteration import SEVERAL_HOSTS, Prediction, predict_iteration
from benchmarks.published_iterations import Iteration
from tutti.hardware.catalog import device, topology
from tutti.report.text_table import columns


def _row(
    devices: int, batch: int, micro: int, width: int, heads: int, layers: int, s: float
) -> Iteration:
    pipe = devices // 8
    return Iteration(
        devices, batch, micro, width, heads, layers, 2048, 8, 1, pipe, 1e3 * s, "several"
    )


# Name -> the row, and the stages of a pipeline rank.
STEPS = {
    "22B": (_row(8, 4, 4, 6144, 64, 48, 1.42), 1),
    "175B": (_row(64, 64, 1, 12288, 96, 96, 18.13), 3),
    "530B": (_row(280, 280, 1, 20480, 128, 105, 49.05), 3),
    "1T": (_row(512, 512, 1, 25600, 160, 128, 94.42), 1),
}


def predict_step(name: str) -> Prediction:
    """The predicted step of a model of `STEPS`."""
    row, chunks = STEPS[name]
    runtime = replace(SEVERAL_HOSTS, chunks=chunks)
    return predict_iteration(row, device("a100-80gb"), topology("dgx-a100"), runtime)


def main() -> None:
    """Print the table."""
    parser(__doc__).parse_args()
    rows = []
    for name, (row, chunks) in STEPS.items():
        seconds = predict_step(name).seconds
        error = seconds / row.milliseconds * 1e3 - 1
        layout = f"tensor=8 pipe={row.pipe} micro={row.num_micro}" + (
            f", {chunks} stages a rank" if chunks > 1 else ""
        )
        rows.append(
            [
                name,
                str(row.devices),
                layout,
                f"{row.milliseconds / 1e3:.2f}",
                f"{seconds:.2f}",
                f"{error:+.1%}",
            ]
        )
    print(columns(["model", "devices", "layout", "seconds", "predicted", "error"], rows))


if __name__ == "__main__":
    main()
