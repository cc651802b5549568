"""Pages in headless Chromium: both themes, print, narrow windows. Skipped where it is not installed."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from html_pages import themes
from run_folders import large_run, trace
from tutti.report.page import page as pages
from tutti.report.page.page import write_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
DARK = "--blink-settings=preferredColorScheme=0"
COLORS = themes(Path(pages.__file__).with_name("page.css").read_text())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a large run."""
    folder = large_run(tmp_path_factory.mktemp("large"))
    for rank in range(4):
        trace(folder, rank)
    return write_page(folder)


def chromium(tmp_path: Path, page: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Open the page, without a network."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(CHROMIUM), *options, "--hide-scrollbars", *words, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def pixels(file: Path) -> tuple[int, int, list[bytes]]:
    """The width, the height and the rows of an 8-bit PNG without interlacing, three or four bytes a pixel."""
    data, at, packed = file.read_bytes(), 8, b""
    width = height = color = 0
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, depth, color, *_ = struct.unpack(">IIBBBBB", body)
            assert depth == 8 and color in (2, 6)
        packed += body if kind == b"IDAT" else b""
        at += 12 + size
    step = 4 if color == 6 else 3
    raw, rows, before = zlib.decompress(packed), [], bytes(width * step)
    for y in range(height):
        line = raw[y * (width * step + 1) : (y + 1) * (width * step + 1)]
        before = _unfiltered(line[0], bytearray(line[1:]), before, step)
        rows.append(before)
    return width, step, rows


def _unfiltered(kind: int, line: bytearray, above: bytes, step: int) -> bytes:
    for i in range(len(line)):
        a = line[i - step] if i >= step else 0
        b, c = above[i], above[i - step] if i >= step else 0
        if kind == 4:
            p = a + b - c
            near = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        else:
            near = (0, a, b, (a + b) // 2)[kind]
        line[i] = (line[i] + near) & 255
    return bytes(line)


def color_at(row: bytes, step: int, x: int) -> str:
    return "#" + row[x * step : x * step + 3].hex()


@pytest.mark.parametrize(("theme", "words"), [("light", []), ("dark", [DARK])])
def test_the_theme_follows_the_browser(
    theme: str, words: list[str], page: Path, tmp_path: Path
) -> None:
    shot = tmp_path / "shot.png"
    chromium(tmp_path, page, f"--screenshot={shot}", "--window-size=900,600", *words)
    width, step, rows = pixels(shot)
    assert width == 900 and color_at(rows[0], step, 0) == COLORS[theme]["back"]
    assert (
        len({color_at(row, step, x) for row in rows for x in range(0, width, 7)}) > 8
    )  # it shows more


def test_a_narrow_window_cuts_nothing_at_its_edge(page: Path, tmp_path: Path) -> None:
    """The last columns of pixels are the background's: what is wide scrolls inside of its own part."""
    shot = tmp_path / "shot.png"
    chromium(tmp_path, page, f"--screenshot={shot}", "--window-size=500,2400")
    width, step, rows = pixels(shot)
    edge = {color_at(row, step, x) for row in rows for x in range(width - 8, width)}
    lines = {COLORS["light"]["back"], COLORS["light"]["border"]}
    assert edge <= lines, edge


def test_it_prints(page: Path, tmp_path: Path) -> None:
    made = tmp_path / "page.pdf"
    chromium(tmp_path, page, f"--print-to-pdf={made}")
    assert made.read_bytes().startswith(b"%PDF") and made.stat().st_size > 20_000


def test_the_browser_reads_what_was_written(page: Path, tmp_path: Path) -> None:
    """Its tree has the same elements: no repair of the markup was needed."""
    text = chromium(tmp_path, page, "--dump-dom").stdout
    written = page.read_text()
    for tag in (
        "section",
        "svg",
        "table",
        "tr",
        "td",
        "th",
        "figure",
        "details",
        "text",
        "rect",
        "path",
    ):
        assert text.count(f"<{tag}") == written.count(f"<{tag}"), tag
