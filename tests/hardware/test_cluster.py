"""Devices as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.errors import PlanError
from tutti.hardware import catalog
from tutti.hardware.cluster import Cluster


@pytest.mark.parametrize(
    ("text", "count", "hosts"),
    [
        ("64 x h100", 64, 8),
        ("64 × h100", 64, 8),
        ("64 * h100", 64, 8),
        ("64x h100", 64, 8),
        ("64xh100", 64, 8),
        ("64 h100", 64, 8),
        ("64 xh100", 64, 8),
        (" 1 x h100 ", 1, 1),
        ("h100", 1, 1),
        ("16 x H100", 16, 2),
        ("12 x a100-80gb", 12, 2),
        ("144 x gb200", 144, 2),
    ],
)
def test_texts(text: str, count: int, hosts: int) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.count, cluster.num_hosts) == (count, hosts)


def test_a_file_whose_name_begins_like_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(catalog.__file__).parent / "devices" / "h100.toml"
    (tmp_path / "2xfast.toml").write_text(file.read_text())
    monkeypatch.chdir(tmp_path)
    assert [Cluster.parse(x).count for x in ("2xfast.toml", "4x2xfast.toml")] == [1, 4]


def test_hosts_have_eight_devices_unless_the_topology_says_more() -> None:
    assert Cluster.parse("64 x h100").topology.host_size == 8
    assert Cluster.parse("64 x gb200").topology.host_size == 72
    assert Cluster.parse("64 x a100-80gb", "hgx-a100-4-hdr").topology.adapters.value == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "cannot read"),
        ("0 x h100", "is 0 devices"),
        ("-2 x h100", "is -2 devices"),
        ("8 x", "unknown"),
        ("64", '64 x NAME, such as "64 x h100"'),
        ("8 x h100, 8 x a100-80gb", "a cluster has devices of one kind"),
        ("8 x h100 + 8 x a100-80gb", "a cluster has devices of one kind"),
        ("8 nodes x 8 h100", '"64 x h100"'),
        ("8x8 h100", '"64 x h100"'),
        ("8 x 8 x h100", '"64 x h100"'),
        ("8 hosts of 8 h100", '"64 x h100"'),
        ("h100 x 64", '"64 x h100"'),
        ("1.5 x h100", '"1 x h100"'),
        (".5 x h100", '"1 x h100"'),
        ("h100 x64", '"64 x h100"'),
        ("64 x none-such", "unknown device"),
    ],
)
def test_other_texts_are_refused(text: str, expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        Cluster.parse(text)


def test_a_file_of_another_ending(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine")
    with pytest.raises(PlanError, match=r"does not end in \.toml[\s\S]*rename it to mine\.toml"):
        Cluster.parse(f"8 x {path}")
