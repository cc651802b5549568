"""Measures two tiny layouts, and prints what was found."""

from __future__ import annotations

import json

from benchmarks.choice_statistics import Candidate, questions_of
from benchmarks.chosen_layouts import Pace, answered

LAYOUTS = ("data=2", "data=2 zero=3 micro=1")


def main() -> None:
    """Two rounds of 0.01 s a turn."""
    tiny = [Candidate(x, 1.0 + i / 9, 1000 - i, 500) for i, x in enumerate(LAYOUTS)]
    asked = questions_of("tiny", 2, tiny, [None])
    (found,) = answered(asked, Pace(rounds=2, turn_seconds=0.01, factor=1.3))
    names = ("num_measured", "best", "ratio", "best_seconds", "seconds", "peak_nbytes")
    numbers = {name: getattr(found, name) for name in names}
    print(json.dumps(numbers | {"chosen": found.question.chosen.layout}))


if __name__ == "__main__":
    main()
