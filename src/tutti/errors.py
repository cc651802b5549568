"""Every error that tutti raises for a user's mistake: what, where, why and the fix."""

from __future__ import annotations


class TuttiError(Exception):
    """A mistake that the caller can fix.

    The message has up to four parts, a line each: what is wrong, `at` (where), `why`, and `fix`.
    """

    def __init__(self, what: str, *, at: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.at, self.why, self.fix = what, at, why, fix
        lines = [what]
        for label, text in (("at", at), ("why", why), ("fix", fix)):
            if text:
                lines.append(f"  {label:<4} {text}")
        super().__init__("\n".join(lines))


class LayoutError(TuttiError):
    """A layout that cannot be read, or cannot work on these ranks."""


class CaptureError(TuttiError):
    """A training step that cannot be captured as one graph."""


class ShardingError(TuttiError):
    """A tensor that cannot be split as asked."""


class ScheduleError(TuttiError):
    """A pipeline schedule that is not valid."""


class PlanError(TuttiError):
    """No layout fits the given devices."""


class CommError(TuttiError):
    """A collective that cannot finish; names the rank, the collective and the waiting line."""


class CheckpointError(TuttiError):
    """A checkpoint that does not fit, is not whole, or is too new."""


class ServerError(TuttiError):
    """A parameter server that refuses or cannot be reached."""
