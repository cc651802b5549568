"""Published iterations on A100 clusters against the cost model: error of the time, regret of the choice.

    python -m benchmarks.measured_clusters FILE                  # every row
    python -m benchmarks.measured_clusters FILE --held-out       # without the rows that fitted the constants
    python -m benchmarks.measured_clusters FILE --fit            # fits them again, prints them
    python -m benchmarks.measured_clusters FILE --tables         # errors by axis, and without each term

The last line has four figures: the mean absolute error on one host and on several, and the regret: the time
of the layout that is predicted to be the fastest, over the time of the fastest, in each problem with at
least four layouts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.command_line import parser
from benchmarks.gpt_iteration import ONE_HOST, SEVERAL_HOSTS, Runtime, predict_iteration
from benchmarks.profile_noise import HOST_SPREAD, noise_regret
from benchmarks.published_iterations import FIT_EVERY, Iteration, groups_of, read_iterations
from tutti.hardware.accelerator import Device
from tutti.hardware.catalog import device, topology
from tutti.hardware.topology import Topology

DEVICE, TOPOLOGY = "a100-80gb", "hgx-a100-4-hdr"
LEAST_LAYOUTS = 4
# Fitted (`--fit`): seconds of the host for each op of eager Megatron-DeepSpeed under a profiler. A step of
# tutti needs a tenth of it.
HOST_SECONDS = 6.3e-5


@dataclass(frozen=True)
class Hardware:
    """The device and topology of the published runs."""

    device: Device
    topology: Topology

    @staticmethod
    def published() -> Hardware:
        """As in the hardware files, with the host of the published program."""
        return Hardware(device(DEVICE), topology(TOPOLOGY)).with_host(HOST_SECONDS)

    def with_host(self, seconds: float) -> Hardware:
        """With another time of the host for each op."""
        figure = replace(self.device.host_seconds, value=seconds)
        return replace(self, device=replace(self.device, host_seconds=figure))

    def simpler(self) -> dict[str, Hardware]:
        """Without one part of the model each."""
        device, topology = self.device, self.topology
        whole = replace(device.matmul_efficiency, value=1.0)
        one = replace(device.processors, value=1.0)
        instant = {
            side: replace(
                link, start=replace(link.start, value=0.0), latency=replace(link.latency, value=0.0)
            )
            for side, link in (("inside", topology.inside), ("between", topology.between))
        }
        return {
            "the time of the host": self.with_host(0.0),
            "tiles and waves": replace(
                self, device=replace(device, processors=one, tiles=((1, 1),), cache_bandwidth=None)
            ),
            "slow matmuls of odd rows": replace(self, device=replace(device, misaligned=None)),
            "efficiency of matmuls": replace(self, device=replace(device, matmul_efficiency=whole)),
            "efficiency of memory": replace(self, device=replace(device, memory_efficiency=whole)),
            "latency of collectives": replace(self, topology=replace(topology, **instant)),
        }

    def with_efficiency(self, share: float) -> Hardware:
        """With another efficiency of the link between hosts."""
        between = self.topology.between
        figure = replace(between.efficiency, value=share)
        changed = replace(between, efficiency=figure, message_efficiency=figure)
        return replace(self, topology=replace(self.topology, between=changed))


@dataclass(frozen=True)
class Score:
    """Mean absolute errors, 0 to 1, and regrets, 1 and more."""

    one_host: float
    several_hosts: float
    mean_regret: float
    worst_regret: float

    def line(self) -> str:
        """The four figures."""
        return (
            f"one host {self.one_host:.1%}, several {self.several_hosts:.1%}, "
            f"regret mean {self.mean_regret:.3f} worst {self.worst_regret:.3f}"
        ).replace("%", " %")


def predicted(
    rows: Sequence[Iteration],
    hardware: Hardware,
    *,
    one: Runtime = ONE_HOST,
    several: Runtime = SEVERAL_HOSTS,
) -> list[float]:
    """Milliseconds of every row; `one` and `several` are the runtimes of rows of one host and of several."""
    made = []
    for row in rows:
        runtime = one if row.on_one_host else several
        made.append(predict_iteration(row, hardware.device, hardware.topology, runtime))
    return [1e3 * prediction.seconds for prediction in made]


def errors(rows: Sequence[Iteration], times: Sequence[float]) -> list[float]:
    """Signed relative errors."""
    return [t / r.milliseconds - 1 for r, t in zip(rows, times, strict=True)]


def mean_error(rows: Sequence[Iteration], times: Sequence[float]) -> float:
    """The mean absolute relative error; 0 without rows."""
    return _mean([abs(e) for e in errors(rows, times)], 0.0)


def regrets(
    rows: Sequence[Iteration], times: Sequence[float], measured: Sequence[float] | None = None
) -> list[float]:
    """Of each problem: the measured time of the choice, over the shortest."""
    truth = [r.milliseconds for r in rows] if measured is None else measured
    found = []
    for group in groups_of(rows, LEAST_LAYOUTS):
        chosen = min(group, key=lambda i: times[i])
        found.append(truth[chosen] / min(truth[i] for i in group))
    return found


def score(rows: Sequence[Iteration], times: Sequence[float], counted: Sequence[bool]) -> Score:
    """The figures; errors of `counted` rows only, regrets of all."""

    def error_of(on_one_host: bool) -> float:
        kept = [i for i, r in enumerate(rows) if r.on_one_host == on_one_host and counted[i]]
        return mean_error([rows[i] for i in kept], [times[i] for i in kept])

    lost = regrets(rows, times)
    return Score(error_of(True), error_of(False), _mean(lost, 1.0), max(lost, default=1.0))


def fit(rows: Sequence[Iteration], hardware: Hardware) -> tuple[float, float]:
    """The time of the host for each op, and the efficiency of the link between hosts, of the least error."""
    one = [r for r in rows[::FIT_EVERY] if r.on_one_host]
    several = [r for r in rows[::FIT_EVERY] if not r.on_one_host]

    def error_of(part: Sequence[Iteration], changed: Hardware) -> float:
        return mean_error(part, predicted(part, changed))

    host = _least(lambda x: error_of(one, hardware.with_host(x)), 5e-6, 150e-6, 1e-6)
    found = hardware.with_host(host)
    share = _least(lambda x: error_of(several, found.with_efficiency(x)), 0.2, 1.0, 0.02)
    return host, share


def _least(function: Callable[[float], float], low: float, high: float, step: float) -> float:
    """The minimum of a function with one valley, by golden section."""
    ratio = (5**0.5 - 1) / 2
    while high - low > step:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if function(a) < function(b) else (a, high)
    return (low + high) / 2


def _mean(values: Sequence[float], without: float) -> float:
    return sum(values) / len(values) if values else without


def noise_line(rows: Sequence[Iteration], hardware: Hardware, found: float) -> str:
    """What regret the host's noise alone would cause, in words."""
    host = hardware.device.host_seconds.value
    made = noise_regret(
        rows, lambda factor: predicted(rows, hardware.with_host(factor * host)), regrets, found
    )
    return (
        f"noise of the host alone ({HOST_SPREAD:.0%} from profile to profile): regret mean {made.mean:.3f} "
        f"worst {made.worst:.3f}; {found:.3f} or more in {made.share_above:.0%} of the draws"
    ).replace("%", " %")


def error_tables(rows: Sequence[Iteration], found: Sequence[float]) -> str:
    """The mean and the mean absolute error by hosts and each number of the layout, as a table of Markdown."""
    lines = [
        "| rows | by | value | number | mean error | mean absolute error |",
        "| - | - | - | - | - | - |",
    ]
    for nodes in ("one", "several"):
        for axis in ("tensor", "data", "pipe", "micro_batch", "width"):
            values: dict[int, list[float]] = {}
            for row, error in zip(rows, found, strict=True):
                if row.nodes == nodes:
                    values.setdefault(getattr(row, axis), []).append(error)
            for value, errs in sorted(values.items()):
                both = f"{_mean(errs, 0):+.1%} | {_mean([abs(e) for e in errs], 0):.1%}"
                lines.append(f"| {nodes} | {axis} | {value} | {len(errs)} | {both} |")
    return "\n".join(lines)


def ablations(rows: Sequence[Iteration], hardware: Hardware, counted: Sequence[bool]) -> str:
    """The figures without each term of the model, the others as they are, as a table of Markdown."""
    lines = ["| without | one host | several | regret mean | worst |", "| - | - | - | - | - |"]

    def add(what: str, times: Sequence[float]) -> None:
        s = score(rows, times, counted)
        shares = f"{s.one_host:.1%} | {s.several_hosts:.1%}"
        lines.append(f"| {what} | {shares} | {s.mean_regret:.3f} | {s.worst_regret:.3f} |")

    made = [predict_iteration(r, hardware.device, hardware.topology) for r in rows]
    add("nothing: the whole model", [1e3 * p.seconds for p in made])
    for term in ("bubble", "gradients", "tied", "update"):
        add(f"the term `{term}`", [1e3 * (p.seconds - p.terms[term]) for p in made])
    for what, changed in hardware.simpler().items():
        add(what, predicted(rows, changed))
    for what, one, several in (
        (
            "recomputed activations (several hosts)",
            ONE_HOST,
            replace(SEVERAL_HOSTS, recomputes=False),
        ),
        (
            "kept activations (one host): recomputed",
            replace(ONE_HOST, recomputes=True),
            SEVERAL_HOSTS,
        ),
        ("the odd vocabulary (one host): padded", replace(ONE_HOST, pads=True), SEVERAL_HOSTS),
        (
            "separate residual sums (one host): fused",
            replace(ONE_HOST, fuses_residual=True),
            SEVERAL_HOSTS,
        ),
    ):
        add(what, predicted(rows, hardware, one=one, several=several))
    return "\n".join(lines)


def main() -> None:
    """Predict, compare, print."""
    made = parser(__doc__, held_out=False, fit=False, rows=False, tables=False)
    made.add_argument("file", type=Path, help="a CSV with the columns of published_iterations.py")
    args = made.parse_args()
    begin = time.perf_counter()
    rows, hardware = read_iterations(args.file), Hardware.published()
    if args.fit:
        host, share = fit(rows, hardware)
        print(f"host {host:.3g} s an op, efficiency between hosts {share:.2f}")
        hardware = hardware.with_host(host).with_efficiency(share)
    times = predicted(rows, hardware)
    if args.rows:
        for row, t, e in zip(rows, times, errors(rows, times), strict=True):
            print(
                f"{row.problem} {row.layout}: {row.milliseconds:.0f} ms, predicted {t:.0f} ({e:+.1%})"
            )
    counted = [not (args.held_out and i % FIT_EVERY == 0) for i in range(len(rows))]
    if args.tables:
        print(
            error_tables(rows, errors(rows, times)),
            ablations(rows, hardware, counted),
            noise_line(rows, hardware, score(rows, times, counted).mean_regret),
            sep="\n\n",
        )
    print(f"{len(rows)} rows in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    print(score(rows, times, counted).line())


if __name__ == "__main__":
    main()
