"""The hardware files: all load, every figure has a source, a wrong figure is refused with the reason."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.errors import PlanError
from tutti.hardware import catalog

FOLDER = Path(catalog.__file__).parent
FILES = sorted(FOLDER.glob("*/*.toml"))
LOAD = {"devices": catalog.device, "links": catalog.link, "topologies": catalog.topology}


def figures(values: Any, at: str = "") -> dict[str, Any]:
    """Every table with a value, by its path in the file."""
    if not isinstance(values, dict):
        return {}
    if "value" in values:
        return {at: values}
    found = {}
    for key, inner in values.items():
        found |= figures(inner, f"{at}.{key}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_file_loads_and_every_figure_has_a_source(path: Path) -> None:
    assert path.stem in catalog.names_of(path.parent.name)
    assert LOAD[path.parent.name](path.stem).name
    found = figures(tomllib.loads(path.read_text()))
    assert found
    assert {at for at, figure in found.items() if len(figure["source"]) < 10} == set()


def test_the_files_are_those_of_the_documentation() -> None:
    """Numbers of a data sheet that a reader can check, dense and in one direction."""
    tera = {
        **{"a100-80gb": 312, "a100-40gb": 312, "h100": 989.4, "h200": 989.4, "b200": 2250},
        **{"gb200": 2500, "mi300x": 1307.4, "tpu-v5e": 197, "tpu-v5p": 459},
        **{"rtx-4090": 165.2, "rtx-5090": 209.5},
    }
    assert set(tera) == set(catalog.names_of("devices"))
    for name, value in tera.items():
        assert catalog.device(name).peak_of(torch.bfloat16) == pytest.approx(value * 1e12)
    assert catalog.device("h100").peak_of(torch.float8_e4m3fn) == pytest.approx(1978.9e12)
    assert catalog.link("nvlink4").bandwidth.value == 450e9


def test_at_most_one_figure_of_a_file_is_fitted() -> None:
    """One, for the network of the A100s; that of their hosts belongs to the program that ran there."""
    fitted = {
        p.stem: [a for a, f in figures(tomllib.loads(p.read_text())).items() if f.get("fitted")]
        for p in FILES
    }
    assert {name: at for name, at in fitted.items() if at} == {"infiniband-hdr": [".efficiency"]}


def edited(tmp_path: Path, kind: str, name: str, old: str, new: str) -> str:
    """A copy of a file with one edit; its path."""
    text = (FOLDER / kind / f"{name}.toml").read_text()
    assert text.count(old) == 1, old
    path = tmp_path / f"{name}.toml"
    path.write_text(text.replace(old, new))
    return str(path)


def test_a_file_of_your_own(tmp_path: Path) -> None:
    path = edited(tmp_path, "devices", "h100", '"NVIDIA H100 SXM"', '"mine"')
    assert catalog.device(path).name == "mine"
    link = edited(tmp_path, "links", "nvlink4", '"NVLink 4 (H100, H200)"', '"my link"')
    hosts = edited(tmp_path, "topologies", "dgx-h100", '"nvlink4"', f'"{Path(link).name}"')
    assert catalog.topology(hosts).inside.name == "my link"


DEVICE_EDITS = [
    (
        "bfloat16 = { value = 9.894e14",
        "bfloat16 = { value = 1979e12",
        "bfloat16 = 1.979e+15 is a sparse peak",
    ),
    (
        "float8 = { value = 1.9789e15",
        "float8 = { value = 3958e12",
        "float8 = 3.958e+15 is a sparse peak",
    ),
    ("bfloat16 = { value = 9.894e14", "bfloat16 = { value = 989", "bfloat16 = 989 cannot be right"),
    (
        "bandwidth = { value = 3.35e12",
        "bandwidth = { value = 3.35e15",
        "bandwidth = 3.35e+15 cannot be right",
    ),
    ("bandwidth = { value = 3.35e12", "bandwidth = { value = 3350", "GB/s need e9"),
    ("kernel = { value = 5e-06", "kernel = { value = -5e-06", "kernel = -5e-06 is negative"),
    ("kernel = { value = 5e-06", "kernel = { value = 5", "kernel = 5 cannot be right"),
    ("efficiency = { value = 0.8,", "efficiency = { value = 1.2,", "0.01 to 1 of the peak"),
    (
        "processors = { value = 132",
        "processors = { value = 1.5",
        "possible are whole numbers from 1",
    ),
    ("capacity = { value = 8e10,", f"capacity = {{ value = {10**400},", "000 cannot be right"),
    ("efficiency = { value = 0.8,", "efficency = { value = 0.8,", "did you mean efficiency"),
    (
        "processors = { value = 132",
        'processors = { value = "132"',
        "processors is not a number: '132'",
    ),
    ("capacity = { value = 8e10,", "capacity = { size = 8e10,", 'unknown key "size"'),
    ("[memory]\n", "[memory]\ncolor = 1\n", 'unknown key "color"'),
    (
        "float32 = { value = 6.7e13",
        "float32 = { value = 6e15",
        "float32 = 6e+15 is above the peak of tf32, 4.947e+14",
    ),
    (
        "capacity = { value = 8e10,",
        'capacity = { fitted = "no", value = 8e10,',
        "fitted must be true or false, and is 'no'",
    ),
    ("[[256, 128],", "[[256, 0],", "tiles must be a list of pairs"),
    ("[[256, 128],", "[[inf, 128],", "tiles must be a list of pairs"),
    ("[[256, 128],", "[[1e400, 128],", "tiles must be a list of pairs"),
    ("[[256, 128],", "[[256.7, 128],", "tiles must be a list of pairs"),
    ("[[256, 128],", '[["256", "128"],', "tiles must be a list of pairs"),
    ("[[256, 128],", "[[256, 128, 1],", "tiles must be a list of pairs"),
    ("[[256, 128],", "[[100000000000000, 1],", "from 1 to 65536"),
    ('topology = "dgx-h100"\n', "", "topology is missing"),
    ("[launch]", "[lunch]", "did you mean launch"),
    ('name = "NVIDIA H100 SXM"', "name = 7", "name must be a name"),
    ('name = "NVIDIA H100 SXM"', "name =", "is not TOML"),
]


@pytest.mark.parametrize(("old", "new", "expected"), DEVICE_EDITS, ids=lambda x: str(x)[:30])
def test_a_wrong_device_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = edited(tmp_path, "devices", "h100", old, new)
    with pytest.raises(PlanError) as error:
        catalog.device(path)
    assert expected in str(error.value)
    assert path in str(error.value)


@pytest.mark.parametrize("figure", ["devices_per_host", "adapters"])
def test_a_host_has_whole_devices_and_adapters(tmp_path: Path, figure: str) -> None:
    own = f"{figure} = {{ value = "
    path = edited(tmp_path, "topologies", "dgx-h100", own + "8", own + "1.5")
    with pytest.raises(PlanError, match=f"{figure} = 1.5 cannot be right") as error:
        catalog.topology(path)
    assert "possible are whole numbers from 1 to 100000" in str(error.value)


@pytest.mark.parametrize("text", [b"# caf\xe9", b"a = " + 4000 * b"[", b"a = " + 5000 * b"1"])
def test_what_is_no_toml_is_refused(tmp_path: Path, text: bytes) -> None:
    (path := tmp_path / "mine.toml").write_bytes(text)
    with pytest.raises(PlanError, match="the hardware file is not TOML"):
        catalog.device(str(path))


def test_a_sparse_peak_names_the_dense_one(tmp_path: Path) -> None:
    path = edited(
        tmp_path, "devices", "h100", "bfloat16 = { value = 9.894e14", "bfloat16 = { value = 1979e12"
    )
    with pytest.raises(
        PlanError, match=r"the dense peak of NVIDIA H100 SXM is 9\.894e\+14"
    ) as error:
        catalog.device(path)
    assert "bfloat16 = 9.894e+14, if it is this device" in str(error.value)


def test_twice_the_peak_of_a_device_without_sparsity_is_possible(tmp_path: Path) -> None:
    """918 TFLOP/s are the dense peak of a TPU v6e, and twice that of a v5p."""
    path = edited(tmp_path, "devices", "tpu-v5p", "value = 4.59e14", "value = 918e12")
    assert catalog.device(path).peak_of(torch.bfloat16) == 918e12


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "latency = { value = 1.8e-06",
            "latency = { value = -1.8e-06",
            "latency = -1.8e-06 is negative",
        ),
        ("start = { value = 7e-06", "start = { value = 7", "a figure in microseconds needs e-6"),
        ("bandwidth = { value = 4.5e11", "bandwidth = { value = 450", "a figure in GB/s needs e9"),
        ("bandwidth = {", "bandwith = {", "did you mean bandwidth"),
        (
            'bandwidth = { value = 4.5e11, source = "NVIDIA H100 data sheet: 900 GB/s in both directions" }',
            "bandwidth = 4.5e11",
            "bandwidth has no source",
        ),
        (
            'source = "NVIDIA H100 data sheet: 900 GB/s in both directions"',
            'source = ""',
            "source must be a name",
        ),
    ],
)
def test_a_wrong_link_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = edited(tmp_path, "links", "nvlink4", old, new)
    with pytest.raises(PlanError) as error:
        catalog.link(path)
    assert expected in str(error.value)


def test_an_unknown_name_lists_the_known_ones_and_says_how_to_calibrate() -> None:
    with pytest.raises(PlanError) as error:
        catalog.device("h1000")
    text = str(error.value)
    assert 'unknown device "h1000"' in text and "did you mean h100?" in text
    assert all(name in text for name in catalog.names_of("devices"))
    assert "copy the file of a similar one" in text and "nccl-tests" in text
    with pytest.raises(PlanError, match=r"cannot read the hardware file"):
        catalog.device("nowhere/mine.toml")


def test_a_dtype_without_a_peak_takes_that_of_float32() -> None:
    assert catalog.device("a100-80gb").peak_of(torch.complex64) == 19.5e12
    with pytest.raises(PlanError, match=r"no peak of torch\.complex64"):
        catalog.device("tpu-v5p").peak_of(torch.complex64)


def test_float64_never_takes_the_peak_of_float32(tmp_path: Path) -> None:
    """A consumer's GPU computes it at a 64th of that rate."""
    assert catalog.device("rtx-4090").peak_of(torch.float64) == pytest.approx(
        82.6e12 / 64, rel=0.01
    )
    assert catalog.device("rtx-5090").peak_of(torch.complex128) == pytest.approx(
        104.8e12 / 64, rel=0.01
    )
    lines = (FOLDER / "devices" / "h100.toml").read_text().splitlines()
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith("float64")))
    with pytest.raises(PlanError, match=r"no peak of torch\.float64(.|\n)*a line float64 ="):
        catalog.device(str(path)).peak_of(torch.float64)


def test_a_file_without_bfloat16_says_so(tmp_path: Path) -> None:
    text = (FOLDER / "devices" / "h100.toml").read_text()
    lines = [x for x in text.splitlines() if not x.startswith(("bfloat16", "tf32"))]
    path = tmp_path / "old.toml"
    path.write_text("\n".join(lines))
    with pytest.warns(
        UserWarning, match=r"old.toml \[peak\] has no bfloat16.* of float32, 6.7e\+13"
    ):
        made = catalog.device(str(path))
    assert made.peak_of(torch.bfloat16) == 6.7e13
    path = tmp_path / "said.toml"  # emulated, and its file says it
    path.write_text(
        "\n".join(lines).replace("[peak]", '[peak]\nbfloat16 = { value = 6.7e13, source = "x" }')
    )
    catalog.device(str(path))


def test_measured_processors_may_be_slower_in_bfloat16(tmp_path: Path) -> None:
    text = (FOLDER / "devices" / "h100.toml").read_text()
    text = text.replace("bfloat16 = { value = 9.894e14", "bfloat16 = { value = 1e13")
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(PlanError, match="is above the peak of bfloat16"):
        catalog.device(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").write_text(text + '\ncall = { value = 1e-4, source = "measured" }\n')
    assert catalog.device(str(tmp_path / "b.toml")).peak_of(torch.bfloat16) == 1e13
