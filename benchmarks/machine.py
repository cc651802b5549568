"""What a result was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

PACKAGES = ("torch", "transformers", "jax", "numpy")
ROOT = Path(__file__).parent.parent


def describe() -> dict[str, str]:
    """Processor, cores, memory, versions, commit, and how busy the machine was when asked."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    found |= {name: version for name in PACKAGES if (version := _version(name))}
    return found | {"commit": _commit(), "load before": f"{os.getloadavg()[0]:.1f}"}


def processor() -> str:
    """The processor's name, as the system gives it."""
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def slug(machine: dict[str, str]) -> str:
    """A name for files: the processor and the number of cores."""
    name = re.sub(r"\([^)]*\)|@.*|\b(CPU|Processor)\b", " ", machine["processor"])
    return "-".join([*re.findall(r"[a-z0-9]+", name.lower()), f"{machine['cores']}-cores"])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Short hash, with a `+` where files were changed since; empty outside of a checkout."""
    try:
        asked = ("describe", "--always", "--dirty=+", "--exclude=*")
        return subprocess.run(
            ["git", *asked], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
