"""Drawings read back: a word stands where its action starts, in text and in the image."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.schedule.schedules import schedule
from tutti.pipeline.schedule.transfers import with_gathers, with_reductions
from tutti.planner.simulator import Timeline, simulate
from tutti.report.timeline import staircase, svg

UNIT = {"F": 1.0, "I": 1.0, "W": 1.0}
NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2)]


def read(drawing: str, num_ranks: int, cell: int = 3) -> list[str]:
    """The rows of a staircase, its blocks put together again; without the names of the ranks.

    A block holds as many cells of `cell` columns as there is room for.
    """
    blocks = [block.split("\n") for block in drawing.split("\n\n")]
    room = (120 - len("rank 0 ")) // cell * cell
    rows = [""] * num_ranks
    for i, block in enumerate(blocks):
        assert len(block) == num_ranks
        for rank, line in enumerate(block):
            assert line.startswith(f"rank {rank}")
            rows[rank] = rows[rank].ljust(i * room) + line[len("rank 0 ") :]
    return rows


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_a_word_stands_where_its_action_starts(name: str, chunks: int) -> None:
    timeline = simulate(schedule(name, 4, 8, chunks), UNIT)
    drawing = staircase(timeline)
    assert max(map(len, drawing.split("\n"))) <= 120
    several = timeline.schedule.num_stages > 4
    cell = 4 if several else 3
    for spans, line in zip(timeline.rows, read(drawing, 4, cell), strict=True):
        found = {m.start(): m[0] for m in re.finditer(r"[0-9A-Z]+-*", line)}
        drawn = {start // cell: (word.rstrip("-"), len(word) + 1) for start, word in found.items()}
        assert all(start % cell == 0 for start in found)
        assert drawn == {
            s.start: (str(s.action) if several else str(s.action)[1:], (s.end - s.start) * cell)
            for s in spans
        }


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb"])
def test_four_ranks_and_eight_micro_batches_fit_one_block(name: str) -> None:
    assert "\n\n" not in staircase(simulate(schedule(name, 4, 8), UNIT))


def test_uneven_and_zero_times_stay_in_order_and_do_not_touch() -> None:
    made = with_reductions(with_gathers(schedule("zb", 3, 11)))
    costs = {"F": 0.37, "I": 0.51, "W": 0.0, "A": 0.9, (1, "F"): 0.71}
    timeline = simulate(made, costs, transfer_seconds=0.05)
    for rank, line in enumerate(read(staircase(timeline), 3)):
        words = [word.rstrip("-") for word in line.split()]
        spans = [s.action for s in timeline.rows[rank] if s.end > s.start]
        assert words == [str(a)[1:] for a in spans]


def test_a_very_uneven_step_is_not_drawn_on_miles_of_text() -> None:
    costs = {"F": 1e-9, "B": 1.0}
    drawing = staircase(simulate(schedule("1f1b", 2, 4), costs), width=60)
    assert len(drawing.split("\n\n")) <= 13 and max(map(len, drawing.split("\n"))) <= 60
    assert "B3--" in drawing


def test_a_step_that_takes_no_time() -> None:
    timeline = simulate(schedule("1f1b", 2, 2), {"F": 0, "B": 0})
    assert staircase(timeline) == "rank 0\nrank 1"
    assert boxes(timeline) and timeline.idle_share == 0.0


def boxes(timeline: Timeline) -> list[tuple[str, float, float, float]]:
    """The titles of the image's boxes with their x, y and width."""
    space = "{http://www.w3.org/2000/svg}"
    found = []
    for group in ElementTree.fromstring(svg(timeline)).iter(f"{space}g"):
        title, box = group.find(f"{space}title"), group.find(f"{space}rect")
        assert title is not None and title.text and box is not None
        x, y, width = (float(box.attrib[a]) for a in ("x", "y", "width"))
        found.append((title.text.split(":")[0], x, y, width))
    return found


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_the_image_holds_every_action_in_proportion(name: str, chunks: int) -> None:
    timeline = simulate(schedule(name, 3, 5, chunks), UNIT, transfer_seconds=0.25)
    spans = [(rank, span) for rank, row in enumerate(timeline.rows) for span in row]
    drawn = boxes(timeline)
    assert [title for title, *_ in drawn] == [str(span.action) for _, span in spans]
    left = min(x for _, x, _, _ in drawn)
    scale = (max(x + width for _, x, _, width in drawn) - left) / timeline.seconds
    heights = sorted({y for _, _, y, _ in drawn})
    for (_, x, y, width), (rank, span) in zip(drawn, spans, strict=True):
        assert y == heights[rank]
        assert x - left == pytest.approx(span.start * scale, abs=0.1)
        assert width == pytest.approx((span.end - span.start) * scale, abs=0.1)


def test_the_image_says_what_is_idle_and_needs_nothing_else() -> None:
    timeline = simulate(schedule("1f1b", 4, 8), UNIT)
    image = svg(timeline)
    texts = [e.text for e in ElementTree.fromstring(image).iter() if e.tag.endswith("text")]
    assert texts.count("idle 27.3%") == 5 and "the step takes 33" in " ".join(map(str, texts))
    assert {"F forward", "B backward", "rank 3"} <= set(texts) and "W weight gradients" not in texts
    ticks = [str(t) for t in texts if str(t).isdigit()][-7:]
    assert ticks == ["0", "5", "10", "15", "20", "25", "30"]
    assert "href" not in image and "url(" not in image


def test_stages_and_later_chunks_can_be_told_apart() -> None:
    made = Schedule.parse("0F0 1F0 1B0 0B0")
    image = svg(simulate(made, UNIT))
    assert image.count("fill-opacity") == 2
