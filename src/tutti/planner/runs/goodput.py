"""The share of a run that trains, under failures and checkpoints.

A run works for an interval, saves for C seconds, and so on. Devices fail independently, each every `mtbf`
seconds on average, so n of them every M = mtbf / n. A failure loses the work since the last checkpoint and
costs R seconds to restart, in which the run may fail again:

    wall seconds of an interval tau  =  M exp(R / M) (exp((tau + C) / M) - 1)
    goodput                          =  tau / wall seconds
    best interval                    =  where goodput is highest; near sqrt(2 C M) - C (Young 1974)

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22, 2006, equation 20.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scipy.optimize import minimize_scalar

from tutti.errors import PlanError
from tutti.quantities import format_seconds

_MOST = 700.0  # an exponent; beyond it, a float overflows


@dataclass(frozen=True)
class Reliability:
    """How a run fails and recovers; seconds.

    num_devices: each of which ends the run when it fails. mtbf: mean time between failures of one device.
    save: that training stands still for a checkpoint. restart: from a failure to the first new step.
    """

    num_devices: int
    mtbf: float
    save: float
    restart: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0.0 if name in ("save", "restart") else 1e-9
            if not least <= value < math.inf:
                raise PlanError(f"{name} = {value:g} is not a time of failures or of recovery")

    @property
    def mean_seconds(self) -> float:
        """Between failures of the run."""
        return self.mtbf / self.num_devices

    def goodput(self, interval: float) -> float:
        """The share of the time that trains, 0 to 1, with a checkpoint every `interval` seconds."""
        working = (interval + self.save) / self.mean_seconds
        restarting = self.restart / self.mean_seconds
        if working + restarting > _MOST:
            return 0.0
        return interval / (self.mean_seconds * math.exp(restarting) * math.expm1(working))

    def best_interval(self) -> float:
        """Seconds between checkpoints with the highest goodput; the shorter, the cheaper a checkpoint.

        Raises:
            PlanError: the run fails so often that it never saves.
        """
        if self.save == 0:
            return 0.0
        if self.save > _MOST * self.mean_seconds:
            raise PlanError(
                f"a run that fails every {format_seconds(self.mean_seconds)} never saves: a checkpoint takes "
                f"{format_seconds(self.save)}",
                why=f"each of {self.num_devices} devices at work fails every {format_seconds(self.mtbf)}",
                fix="a longer time between failures",
            )
        without = replace(self, restart=0.0)  # a restart costs every interval the same share
        found = minimize_scalar(
            lambda x: -without.goodput(math.exp(x)),
            bounds=(math.log(self.save) - 10, math.log(self.mean_seconds) + 3),
            method="bounded",
        )
        return math.exp(found.x)
