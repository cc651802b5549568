"""Every error that tutti raises for a user's mistake, with its place, its cause and a fix."""

from __future__ import annotations


class TuttiError(Exception):
    """A mistake that the caller can fix.

    The message has up to four parts, a line each: the problem, `at` (its place), `why`, and `fix`.
    """

    def __init__(self, what: str, *, at: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.at, self.why, self.fix = what, at, why, fix
        lines = [what]
        for label, text in (("at", at), ("why", why), ("fix", fix)):
            if text:
                lines.append(f"  {label:<4} {text}")
        super().__init__("\n".join(lines))


class LayoutError(TuttiError):
    """A layout that is invalid, or cannot work on these ranks."""


class CaptureError(TuttiError):
    """A training step that cannot be captured as one graph."""


class ShardingError(TuttiError):
    """A tensor that cannot be split as requested."""


class ScheduleError(TuttiError):
    """A pipeline schedule that is not valid."""


class PlanError(TuttiError):
    """No layout fits the given devices, or a device is unknown or has a figure that cannot be right."""


class CommError(TuttiError):
    """A collective that cannot finish; names the rank, the collective and the waiting line."""


class CheckpointError(TuttiError):
    """A checkpoint that does not fit, is incomplete, or is too new."""


class ServerError(TuttiError):
    """A parameter server that refuses or is unreachable."""
