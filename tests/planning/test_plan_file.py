"""Plans as files: what is written is read, and others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tutti.errors import PlanError, TuttiError
from tutti.planning.plan_file import Plan, fingerprint, parse_nbytes


def plan() -> Plan:
    return Plan(
        layout="data=2 zero=1",
        place={"*.weight": "tensor, -"},
        devices="2 x h100",
        num_ranks=2,
        rows=8,
        model=fingerprint(nn.Linear(3, 4)),
        version="1.2",
        seconds=0.5,
        peak_nbytes=100,
        layouts=[{"layout": "data=2 zero=1", "seconds": 0.5, "peak_nbytes": 100, "fits": True}],
    )


def test_a_plan_is_read_as_written(tmp_path: Path) -> None:
    plan().write(tmp_path / "a.json")
    assert Plan.read(tmp_path / "a.json") == plan()
    Plan.read(tmp_path / "a.json").check(nn.Linear(3, 4), "1.2", 2)


@pytest.mark.parametrize(
    ("model", "version", "world_size", "text"),
    [
        (nn.Linear(3, 5), "1.2", 2, "another model"),
        (nn.Linear(3, 4).to(torch.bfloat16), "1.2", 2, "another model"),
        (nn.Linear(3, 4), "1.3", 2, "made by tutti 1.2, this is 1.3"),
        (nn.Linear(3, 4), "1.2", 4, "for 2 ranks, and 4 are running"),
    ],
)
def test_another_model_version_or_world_is_refused(
    model: nn.Module, version: str, world_size: int, text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        plan().check(model, version, world_size)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_ranks", "two", 'num_ranks is "two", not a count'),
        ("num_ranks", True, "num_ranks is true, not a count"),
        ("rows", 0, "rows is 0, not a count"),
        ("layout", None, "layout is null, not a text"),
        ("seconds", float("nan"), "seconds is NaN, not a number"),
        ("peak_nbytes", [1], r"peak_nbytes is \[1\], not a number"),
        ("place", {"0.weight": 7}, r'place\["0.weight"\] is 7, not a text'),
        ("place", None, "place is null, not an object"),
        ("found", 3, "found is 3, not an object"),
        ("layouts", {}, "layouts is {}, not a list"),
        ("layouts", [3], r"layouts\[0\] is 3, not an object"),
        ("layouts", [{"fits": 1}], r"layouts\[0\].fits is 1, not true or false"),
        ("layouts", [{"kinds": {"compute": "x"}}], r'layouts\[0\].kinds\["compute"\] is "x", not'),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(
    field: str, value: object, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    plan().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(PlanError, match=text):
        Plan.read(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layout": "data=2"}', "\x00"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(PlanError, match="no plan"):
        Plan.read(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    replace(plan(), format=9).write(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["format"] == 9
    with pytest.raises(PlanError, match="no plan of this version"):
        Plan.read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("rows", None, "a.json is no plan: it lacks rows"),
        ("extra", 1, "a.json is no plan: it has extra"),
        ("layout", "data=3", r'layout "data=3" needs 3 ranks, and num_ranks is 2\n  at   .*a.json'),
        ("layout", "data=2 foo=3", r'unknown word "foo=3".*\n  at   .*a.json, layout'),
        ("num_ranks", 1, "needs 2 ranks, and num_ranks is 1"),
    ],
)
def test_an_edited_plan_is_refused_by_what_is_wrong(
    field: str, value: object, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    plan().write(path)
    values = json.loads(path.read_text()) | {field: value}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None or k == "found"}))
    with pytest.raises(TuttiError, match=text):
        Plan.read(path)


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.read(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot write the plan"):
        plan().write(tmp_path / "none" / "a.json")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("70GB", 7e10), ("512 MB", 5.12e8), ("1e9", 1e9), ("1.5 tb", 1.5e12), ("1GiB", 2**30)],
)
def test_bytes(text: str, nbytes: float) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "many", "1e20GB", "70", "70 GO"])
def test_no_bytes(text: str) -> None:
    with pytest.raises(PlanError, match="as bytes"):
        parse_nbytes(text)
