"""What a run of the benchmark found, as it is kept in a JSON file."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Entry


@dataclass
class Race:
    """All ways on one model; `unit` is what is counted: tokens or images."""

    model: str
    unit: str
    num_parameters: int
    sizes: dict[str, Any]
    entries: list[Entry]

    def find(self, way: str) -> Entry | None:
        """The entry of a way that was run to the end."""
        return next((e for e in self.entries if e.way == way and not e.error), None)

    def same_batch(self, a: str, b: str) -> bool:
        """Whether both train the same number of samples a step."""
        return self._pair(a, b) is not None and self._units(a) == self._units(b)

    def time_ratio(self, a: str, b: str) -> float | None:
        """How long a step of `a` takes in steps of `b`: the median over the rounds of their ratio."""
        pair = self._pair(a, b)
        if pair is None:
            return None
        rounds = zip(pair[0].seconds, pair[1].seconds, strict=True)
        return statistics.median(x / y for x, y in rounds)

    def memory_ratio(self, a: str, b: str) -> float | None:
        """Peak memory per rank of `a` in that of `b`."""
        pair = self._pair(a, b)
        return pair[0].peak_nbytes / pair[1].peak_nbytes if pair else None

    def _pair(self, a: str, b: str) -> tuple[Entry, Entry] | None:
        first, second = self.find(a), self.find(b)
        return (first, second) if first and second else None

    def _units(self, way: str) -> int:
        entry = self.find(way)
        return entry.units if entry else 0


@dataclass
class Result:
    """Everything of one run."""

    date: str
    machine: dict[str, str]
    pace: dict[str, float]
    races: list[Race] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote."""
        given = json.loads(path.read_text())
        given["races"] = [
            Race(**race | {"entries": [Entry(**e) for e in race["entries"]]})
            for race in given["races"]
        ]
        return cls(**given)
