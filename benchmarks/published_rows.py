"""The rows of `published_rates.toml`: published training rates, and the settings that tutti cannot play."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "published_rates.toml"


@dataclass(frozen=True)
class PublishedRow:
    """A measured setting and the nearest one that tutti plays; fields as in the file.

    sizes: of the model, the arguments of `published_models.make_model`.
    """

    name: str
    source: str
    model: str
    device: str
    devices: int
    layout: str
    sequence: int
    batch: int
    attention: str
    recompute: str
    runtime: str
    sizes: Mapping[str, Any]
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    flops_per_token: float = 0.0
    memory_gib: float = 0.0
    state_gib: float = 0.0
    place: str = "megatron"
    messages: str = "whole"
    differs: str = ""
    reason: str = ""

    @property
    def rate(self) -> float:
        """Published tokens per second of a device."""
        if self.tokens_per_second:
            return self.tokens_per_second
        if self.seconds:
            return self.batch * self.sequence / self.seconds / self.devices
        return self.flops / self.flops_per_token


@dataclass(frozen=True)
class LeftOut:
    """A published setting that tutti cannot play: what was published, and why it is left out."""

    name: str
    source: str
    published: str
    reason: str


@dataclass(frozen=True)
class PublishedRates:
    """The content of the file."""

    rows: tuple[PublishedRow, ...]
    left_out: tuple[LeftOut, ...] = field(default=())


def read_models(path: Path = FILE) -> Mapping[str, Mapping[str, Any]]:
    """The sizes of each model of a file, by name."""
    return tomllib.loads(path.read_text())["models"]


def read_rows(path: Path = FILE) -> PublishedRates:
    """The rows of a file.

    Raises:
        SystemExit: the file cannot be read, or a row lacks a field, has an unknown one or no rate.
    """
    try:
        table = tomllib.loads(path.read_text())
        rows = tuple(
            PublishedRow(**one, sizes=table["models"][one["model"]]) for one in table["row"]
        )
        left_out = tuple(LeftOut(**one) for one in table.get("left_out", []))
        without = [row.name for row in rows if row.rate <= 0]
    except (OSError, tomllib.TOMLDecodeError, TypeError, KeyError, ZeroDivisionError) as error:
        raise SystemExit(f"cannot read {path}: {error}") from None
    if without:
        raise SystemExit(f"{path}: no rate in {', '.join(without)}")
    return PublishedRates(rows, left_out)
