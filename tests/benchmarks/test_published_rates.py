"""One published row from the file to the table, and the bounds by which rows are judged."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published_rates
from benchmarks.published_rates import Compared, predict_row, table
from benchmarks.published_rows import read_rows


def test_a_row_is_predicted_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensor parallelism, stages, interleaving, eager attention, recomputed layers."""
    monkeypatch.setattr(sys, "argv", ["published_rates", "--models", "GPT 530B"])
    published_rates.main()
    out = capsys.readouterr().out
    assert "rates within 12 %: 1 of 1" in out and "Left out" not in out
    (line,) = [x for x in out.splitlines() if "pipe=35" in x]
    _, name, _, published, predicted, ratio, *_ = (cell.strip() for cell in line.split("|"))
    assert name.startswith("GPT 530B") and published == "42"
    assert float(predicted) / 41.76 == pytest.approx(float(ratio), abs=0.02)


def test_selective_recomputation_keeps_less_and_takes_longer() -> None:
    (row,) = [r for r in read_rows().rows if r.name == "Llama 3 8B, 8 H100, FSDP, compiled"]
    none, some, full = (
        predict_row(replace(row, recompute=mode)) for mode in ("none", "matmuls", "layers")
    )
    assert none.rate > some.rate > full.rate
    assert none.memory_gib > some.memory_gib > full.memory_gib


def test_rows_are_judged_by_rate_memory_and_capacity() -> None:
    row = replace(read_rows().rows[0], tokens_per_second=100.0, memory_gib=10.0)
    cases = {
        "yes": Compared(row, 111, 10.7, True),
        "no: rate": Compared(row, 113, 10.0, True),
        "no: memory": Compared(row, 89, 9.1, True),
        "no: rate and memory": Compared(row, 87, 11, True),
        "yes; does not fit": Compared(row, 100, 10, False),
    }
    for words, one in cases.items():
        assert table([one]).splitlines()[-1].endswith(f"| {words} |")


def test_every_row_names_its_rate_source_and_layout() -> None:
    rates = read_rows()
    assert len({r.name for r in rates.rows}) == len(rates.rows) > 10
    for row in rates.rows:
        assert row.source and row.rate > 0 and row.layout
    assert all(r.reason and r.published for r in rates.left_out)


def test_a_file_without_a_rate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text("[models.a]\n[[row]]\nname = 'x'\nmodel = 'a'\n")
    with pytest.raises(SystemExit, match="cannot read"):
        read_rows(path)
