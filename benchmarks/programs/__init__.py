"""Training programs as their users write them, which `benchmarks.verify_programs` runs."""

from __future__ import annotations

import importlib

from benchmarks.programs.script import Program, Script

FAMILIES = (
    "language",
    "hugging_face",
    "vision",
    "pictures",
    "contrastive",
    "self_supervised",
    "generative",
    "adversarial",
    "decisions",
    "policies",
    "graphs",
    "structured",
    "optimizers",
    "own_optimizers",
    "weights",
    "losses",
    "habits",
    "packaged",
)

__all__ = ["Program", "Script", "programs"]


def programs() -> dict[str, Program]:
    """Every program by name."""
    found: dict[str, Program] = {}
    for family in FAMILIES:
        found |= importlib.import_module(f"benchmarks.programs.scripts.{family}").program.programs
    return found
