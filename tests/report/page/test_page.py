"""The page of a run: valid, offline, small, for readers without a mouse or colors, safe from HTML."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from html_pages import Page, contrast, themes
from run_folders import (
    BEGAN,
    begin,
    collective,
    facts,
    large_run,
    memory,
    points,
    program,
    small_run,
    state_of_layers,
    step,
    tensor,
    trace,
    write_lines,
)
from tutti.cli.main import app
from tutti.errors import TuttiError
from tutti.report.page import page as pages
from tutti.report.page.page import page_of, write_page

MOST_NBYTES = 2_000_000
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e\x00\x1b[31mä中🙂"
PLAN = {
    "layouts": [
        {"layout": "data=4", "seconds": 0.3, "peak_nbytes": 9e6, "fits": True},
        {"layout": "tensor=2 data=2", "seconds": 0.2, "peak_nbytes": 5e6, "fits": True},
        {"layout": "pipe=4", "seconds": 0.1, "peak_nbytes": 9e9, "fits": False},
        {"layout": EVIL, "seconds": None, "peak_nbytes": "x", "fits": True},
        "nonsense",
    ]
}
VERDICT = {
    "ok": True, "layout": "data=2", "steps": 2, "num_tensors": 3, "max_error": 1e-13, "worst": "w",
    "capture_error": 0.0, "worst_capture": "", "text": "verify ...: ok",
}  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a large run with all that a folder may hold."""
    folder = large_run(tmp_path_factory.mktemp("large"))
    for rank in range(4):
        trace(folder, rank)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "verify.json").write_text(json.dumps(VERDICT))
    return page_of(folder)


def test_a_large_run_stays_below_two_megabytes(large: str) -> None:
    assert 100_000 < len(large.encode()) < MOST_NBYTES
    tables = Page(large).tables("tensors")
    (caption,) = [c for c in tables if "Tensors" in c]
    assert len(tables[caption]) == 32 * 12


def test_many_tensors_are_cut_with_a_word(tmp_path: Path) -> None:
    many = [tensor(f"a.rather.long.name.of.tensor.number.{k}") for k in range(9000)]
    write_lines(tmp_path / "rank-0.jsonl", [begin(), step(), program(facts(many))])
    text = page_of(tmp_path)
    assert len(text.encode()) < MOST_NBYTES and "(the first 2500 of 9000)" in text


def test_nothing_is_loaded_from_elsewhere(large: str) -> None:
    assert not re.search(r"(https?:)?//\w", large), "an address"
    page = Page(large)
    names = {e.tag for e in page.every}
    assert names.isdisjoint(
        {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image"}
    )
    for e in page.every:
        assert all(not name.startswith("on") for name in e.attributes), e
        assert e.attributes.get("href", "#").startswith("#") and "src" not in e.attributes
        assert "url(" not in e.attributes.get("style", "") and "xlink:href" not in e.attributes
    assert "url(" not in large and "@import" not in large
    (policy,) = [e for e in page.find("meta") if e.attributes.get("http-equiv")]
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_the_structure_is_sound(large: str) -> None:
    page = Page(large)  # nested as it must be
    assert page.root.find("html")[0].attributes["lang"] == "en" and large.startswith(
        "<!doctype html>"
    )
    ids = [e.attributes["id"] for e in page.every if "id" in e.attributes]
    assert len(set(ids)) == len(ids)
    named = [e.attributes[k] for e in page.every for k in ("aria-labelledby",) if k in e.attributes]
    assert {x for words in named for x in words.split()} <= set(ids)
    targets = [e.attributes["href"].removeprefix("#") for e in page.find("a")]
    assert set(targets) <= set(ids) and targets[0] == "main"
    assert len(page.find("h1")) == len(page.find("main")) == 1
    assert [e.attributes["href"] for e in page.find("nav")[0].find("a")] == [
        f"#{s.attributes['id']}" for s in page.find("section")
    ]


def test_every_picture_has_a_title_a_role_and_a_table_beside_it(large: str) -> None:
    page = Page(large)
    pictures = page.find("svg")
    assert len(pictures) >= 8
    for svg in pictures:
        assert svg.attributes["role"] == "img"
        title, description = svg.children[:2]
        assert (title.tag, description.tag) == ("title", "desc")
        assert title.all_text().strip() and description.all_text().strip()
        assert svg.attributes["aria-labelledby"].split() == [
            title.attributes["id"], description.attributes["id"],
        ]  # fmt: skip
    for section in page.find("section"):
        if section.find("svg"):
            assert section.find("table"), section.attributes["id"]


def test_tables_and_scrolling_parts_are_for_all(large: str) -> None:
    page = Page(large)
    for table in page.find("table"):
        assert table.find("caption")[0].all_text().strip()
        heads = table.find("th")
        assert all(h.attributes["scope"] in ("col", "row") for h in heads) and heads
    for e in page.every:
        if e.attributes.get("class") == "scroll":
            assert e.attributes["tabindex"] == "0" and e.attributes["role"] == "region"
            assert e.attributes["aria-label"].strip()


CSS = Path(pages.__file__).with_name("page.css").read_text()
TEXTS = [
    *((c, b) for c in ("text", "muted", "link", "good", "bad", "open") for b in ("back", "panel")),
    *(("on", f"s{k}") for k in range(1, 7)),
]
SHAPES = [(c, "back") for c in ("s1", "s2", "s3", "s4", "s5", "s6", "axis", "focus", "bad")]
SHAPES += [(f"s{k}", "idle") for k in range(1, 7)]


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_colors_have_the_contrast_of_wcag_aa(theme: str) -> None:
    colors = themes(CSS)[theme]
    low = [(a, b, contrast(colors[a], colors[b])) for a, b in TEXTS]
    low += [(a, b, 1.5 * contrast(colors[a], colors[b])) for a, b in SHAPES]  # 3 to 1 for shapes
    assert [x for x in low if x[2] < 4.5] == []


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_there_are_styles_for_dark_print_and_focus() -> None:
    assert "prefers-color-scheme: dark" in CSS and "@media print" in CSS and ":focus-visible" in CSS


def evil_run(folder: Path) -> None:
    """HTML wherever a user may put a text."""
    one = tensor(EVIL, reason=EVIL, stored=EVIL)
    slot = tensor(f"optim.{EVIL}", "slot", EVIL)
    moved = [collective(EVIL, cause=EVIL, kind=EVIL)]
    shown = facts(
        [one, slot], collectives=moved, fallbacks=[EVIL], layout=EVIL, memory=memory(9, EVIL)
    )
    shown["batch"] = [
        {"name": EVIL, "dtype": "f32", "shape": [1], "given": EVIL, "computed": "-", "reason": EVIL}
    ]
    shown["servers"] = [{"name": EVIL, "shape": [1], "servers": [0], "num_blocks": 1, "nbytes": 1}]
    stages = [
        {"number": k, "pipe": k, "seconds": 1.0, "modules": [EVIL], "line": EVIL} for k in (0, 1)
    ]
    messages = [{"from": 0, "to": 1, "nbytes": 5, "times": 2, "line": EVIL}]
    rows = [[[EVIL, "F", 0.0, 1.0]], [["1F0", "F", 1.0, 2.0]]]
    shown["pipeline"] = {"num_micro": 2, "stages": stages, "messages": messages, "rows": rows}
    shown["pipeline"] |= {"seconds": 2.0, "idle_share": 0.5}
    write_lines(
        folder / "rank-0.jsonl",
        [
            begin(argv=[EVIL], host=EVIL, versions={EVIL: EVIL}),
            step(EVIL, EVIL, optimizers=[EVIL], line=EVIL, layout=EVIL),
            program(shown, why=EVIL),
            points(9, (EVIL,)),
            {"kind": "nan", "time": BEGAN, "of": 1, "step": 3, "name": EVIL, "value": EVIL},
            {"kind": "save", "time": BEGAN, "step": 3, "folder": EVIL, "seconds": 0.5},
        ],
    )
    said = {"kind": "said", "time": BEGAN, "text": EVIL}
    told = {"kind": "run", "time": BEGAN, "command": [EVIL], "layout": EVIL, "profile": ""}
    write_lines(folder / "launcher.jsonl", [begin("launcher"), told, said])
    (folder / "verify.json").write_text(
        json.dumps(VERDICT | {"layout": EVIL, "worst": EVIL, "text": EVIL})
    )
    (folder / "plan.json").write_text(json.dumps(PLAN))
    trace(folder, 0, 40)
    events = (folder / "rank-0.json").read_text()
    (folder / "rank-0.json").write_text(events.replace("mm", json.dumps(EVIL)[1:-1]))


def test_html_of_the_user_stays_text(tmp_path: Path) -> None:
    evil_run(tmp_path)
    text = page_of(tmp_path)
    page = Page(text)
    names = {e.tag for e in page.every}
    assert names.isdisjoint({"script", "img"})
    assert all(not a.startswith("on") for e in page.every for a in e.attributes)
    assert "\x00" not in text and "\x1b" not in text and "\u202e" not in text
    assert text.count("alert(1)") > 20  # it is all there, as text
    assert "ä中🙂" in text


def test_names_that_no_encoding_has(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "rank-0.jsonl", [begin(), step("\ud800x"), program(facts([tensor("\udfff")]))]
    )
    assert write_page(tmp_path).read_text(encoding="utf-8").count("x of GPT")


def test_what_is_not_there_is_not_shown(tmp_path: Path) -> None:
    page = Page(page_of(small_run(tmp_path)))
    names = [s.attributes["id"] for s in page.find("section")]
    assert names == ["run", "loss", "time", "memory", "tensors", "collectives", "events"]


def test_a_folder_with_a_verdict_alone(tmp_path: Path) -> None:
    (tmp_path / "verify.json").write_text(json.dumps(VERDICT | {"ok": False}))
    page = Page(page_of(tmp_path))
    assert "NOT the same step" in page.section("verify").all_text()
    assert "Not run yet" in page.find("header")[0].all_text()


def test_traces_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    for rank in range(2):
        trace(small_run(tmp_path), rank, 40)
    os.utime(tmp_path / "rank-1.json", (BEGAN - 60, BEGAN - 60))
    page = Page(page_of(tmp_path))
    assert "rank-1.json is a trace of an earlier run" in page.section("run").all_text()
    assert [r["rank"] for r in page.tables("timeline")["The measured step"]] == ["rank 0"]


def test_a_verdict_of_another_layout_says_so(tmp_path: Path) -> None:
    (small_run(tmp_path) / "verify.json").write_text(json.dumps(VERDICT))
    assert "another layout: data=2 tensor=2" in Page(page_of(tmp_path)).section("verify").all_text()
    (tmp_path / "verify.json").write_text(json.dumps(VERDICT | {"layout": "tensor=2 data=2"}))
    assert "another layout" not in Page(page_of(tmp_path)).section("verify").all_text()


def test_the_plan_marks_this_run_and_orders_by_time(tmp_path: Path) -> None:
    (small_run(tmp_path) / "plan.json").write_text(json.dumps(PLAN))
    page = Page(page_of(tmp_path))
    rows = page.tables("plan")["Layouts of the plan"]
    assert [r["layout"] for r in rows][:2] == ["tensor=2 data=2 (this run)", "data=4"]
    assert rows[0] | {"layout": ""} == {
        "layout": "", "step, predicted": "200 ms", "peak memory": "5 MB", "fits": "yes",
    }  # fmt: skip
    assert rows[-1]["layout"] == "pipe=4" and rows[-1]["fits"] == "no"
    assert "the fastest that fits is tensor=2 data=2" in page.section("plan").all_text()


@pytest.mark.parametrize("text", ["", "[1", "[]", "null", "\x00\xff"])
def test_broken_files_are_named_and_left_out(text: str, tmp_path: Path) -> None:
    small_run(tmp_path)
    for name in ("plan.json", "verify.json", "rank-0.json"):
        (tmp_path / name).write_text(text)
    words = Page(page_of(tmp_path)).section("run").all_text()
    assert all(f"{name} " in words for name in ("plan.json", "verify.json", "rank-0.json"))


def test_cut_lines_are_counted(tmp_path: Path) -> None:
    with open(small_run(tmp_path) / "rank-0.jsonl", "a") as file:
        file.write('{"kind":"steps","of":1,"poi')
    page = Page(page_of(tmp_path))
    assert "rank-0.jsonl: 1 lines are cut" in page.section("run").all_text()
    assert page.tables("loss")


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    nan = points(5, loss=float("nan"))
    nan["points"] = [[*p[:3], "nan"] for p in nan["points"]]
    write_lines(tmp_path / "rank-0.jsonl", [begin(), step(), points(20), {**nan}])
    page = Page(page_of(tmp_path))
    assert page.section("loss").find("svg")
    write_lines(tmp_path / "rank-0.jsonl", [begin(), step(), nan])
    words = Page(page_of(tmp_path)).section("loss").all_text()
    assert "loss of train_step of GPT was no number at any step" in words


def rows_of_steps(folder: Path) -> list[int]:
    """The steps of the sampled table."""
    tables = Page(page_of(folder)).tables("loss")
    return [int(r["step"]) for r in next(iter(tables.values()))]


def test_a_run_that_goes_on_continues_its_curve_and_one_anew_does_not(tmp_path: Path) -> None:
    first = [begin(), step(), points(9)]
    again = [begin(at=BEGAN + 60), step(), points(6, first=6)]
    write_lines(tmp_path / "rank-0.jsonl", [*first, *again])
    assert rows_of_steps(tmp_path) == list(range(1, 12))  # 6 to 9 are those of the second start
    anew = [begin(at=BEGAN + 90), step(layout="data=4"), points(3)]
    write_lines(tmp_path / "rank-0.jsonl", [*first, *again, *anew])
    assert rows_of_steps(tmp_path) == [1, 2, 3]
    earlier = Page(page_of(tmp_path)).tables("run")["Earlier starts in this folder"]
    assert [(r["layout"], r["steps"]) for r in earlier] == [
        ("data=2 tensor=2", "1 to 9"),
        ("data=2 tensor=2", "6 to 11"),
    ]


def test_ranks_of_an_older_run_are_left_out(tmp_path: Path) -> None:
    for rank in range(8):
        name = f"rank {rank}"
        old = [begin(name, world_size=8), step(), points(9)]
        new = [begin(name, at=BEGAN + 60, world_size=2), step(), points(4)] if rank < 2 else []
        write_lines(tmp_path / f"rank-{rank}.jsonl", [*old, *new])
    tables = Page(page_of(tmp_path)).tables("time")
    assert [r["rank"] for r in tables["Time of a step by rank"]] == ["rank 0", "rank 1"]
    write_lines(tmp_path / "launcher.jsonl", [begin("launcher", at=BEGAN + 59)])
    tables = Page(page_of(tmp_path)).tables("time")
    assert [r["rank"] for r in tables["Time of a step by rank"]] == ["rank 0", "rank 1"]


def test_a_step_without_a_prediction_says_why(tmp_path: Path) -> None:
    measured = {"kind": "measured", "of": 1, "seconds": 0.2, "predicted_seconds": None}
    write_lines(tmp_path / "rank-0.jsonl", [begin(), step(), points(9), measured])
    (row,) = Page(page_of(tmp_path)).tables("time")["Measured beside predicted"]
    assert "no plan chose the layout" in row.values()


def test_replicas_have_a_curve_each(tmp_path: Path) -> None:
    for rank in range(4):
        more = {"layout": "replica=2 data=2 sync=gossip()"}
        lines = [begin(f"rank {rank}", world_size=4), step(**more), points(9, loss=1.0 + rank)]
        write_lines(tmp_path / f"rank-{rank}.jsonl", lines)
    text = Page(page_of(tmp_path)).section("loss").find("svg")[0].all_text()
    assert "loss, replica 0 1" in text and "loss, replica 1 3" in text


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"kind": "ended", "code": 0}], "Ended well"),
        ([{"kind": "ended", "code": 3}], "Failed, exit code 3"),
        ([{"kind": "ended", "code": None}], "Failed"),
        ([{"kind": "ended", "code": 130}], "Ended by Ctrl-C, exit code 130"),
        ([], "No end recorded: it still runs, or its launcher was killed"),
    ],
)
def test_how_a_run_ended(records: list[dict[str, object]], words: str, tmp_path: Path) -> None:
    write_lines(small_run(tmp_path) / "launcher.jsonl", [begin("launcher"), *records])
    assert Page(page_of(tmp_path)).find("strong")[0].all_text() == words


def test_the_command(tmp_path: Path) -> None:
    invoke = CliRunner().invoke
    for bad, words in ((tmp_path / "none", "is no folder"), (tmp_path, "has no records of a run")):
        result = invoke(app, ["report", str(bad)])
        assert (
            result.exit_code == 2
            and words in result.stderr
            and "tutti run --report" in result.stderr
        )
    (tmp_path / "notes.jsonl").write_text("hello\n")
    assert "lines are cut or are no records" in invoke(app, ["report", str(tmp_path)]).stderr
    small_run(tmp_path)
    result = invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0 and result.stdout.strip() == str(tmp_path / "report.html")
    other = tmp_path / "other.html"
    assert invoke(app, ["report", str(tmp_path), "--output", str(other)]).exit_code == 0
    assert other.read_text().startswith("<!doctype html>")
    with pytest.raises(TuttiError, match="cannot write the page"):
        write_page(tmp_path, tmp_path / "none" / "x.html")
    assert [p.name for p in tmp_path.iterdir() if "draft" in p.name] == []


def test_joined_collectives_are_counted_as_sent(tmp_path: Path) -> None:
    shown = facts(
        state_of_layers(1, 2), collectives=[collective("model.py:12", count=29)], num_sent=3
    )
    write_lines(tmp_path / "rank-0.jsonl", [begin(), step(), program(shown), points(5, loss=0.5)])
    assert "29 collectives, joined into 3 exchanges, 4.1 kB a step, from 1 line." in page_of(
        tmp_path
    )


def test_a_pipeline_without_collectives_has_its_messages(tmp_path: Path) -> None:
    messages = [
        {"from": 0, "to": 1, "nbytes": 2000, "times": 4, "line": "model.py:3"},
        {"from": 1, "to": 0, "nbytes": 1000, "times": 4, "line": "model.py:3"},
    ]
    shown = facts(state_of_layers(1, 2), collectives=[])
    shown["pipeline"] = {"num_micro": 4, "stages": [], "messages": messages}
    write_lines(tmp_path / "rank-0.jsonl", [begin(), step(), program(shown), points(5, loss=0.5)])
    found = Page(page_of(tmp_path)).tables("collectives")
    rows = found["Messages between pipeline ranks, 12 kB a step"]
    assert [(r["pipe"], r["times a step"], r["bytes a step"]) for r in rows] == [
        ("0 to 1", "4", "8 kB"),
        ("1 to 0", "4", "4 kB"),
    ]


def test_the_facts_on_the_page_are_those_of_the_records(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "rank-0.jsonl",
        [begin(), step(), program(facts(state_of_layers(1, 2))), points(50, loss=0.5)],
    )
    page = Page(page_of(tmp_path))
    (collectives, _) = page.tables("collectives").values()
    assert collectives == [
        {"line": "model.py:12", "collectives": "all_reduce", "count": "3", "bytes sent": "4.1 kB"}
    ]
    (row,) = page.tables("memory")["Predicted memory"]
    assert (row["peak"], row["state"], row["of a call"]) == ("8 MB", "5 MB", "3 MB")
    tensors = page.tables("tensors")["Tensors of the state"]
    assert [r["per rank"] for r in tensors] == ["1.05 MB"] * 2
    assert [r["slots per rank"] for r in tensors] == ["3.15 MB"] * 2
    cards = page.find("dl")[0].all_text()
    assert "50" in cards and "0.5" in cards
