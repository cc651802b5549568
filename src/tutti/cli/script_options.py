"""Commands with a script: an argument behind it belongs to the script, with a hint if it looks like an option
of the command.

    tutti plan --devices "64 x h100" train.py --lr 0.1         --lr is the script's
    tutti simulate train.py --layout ... --devices ...         both are needed: the command's
"""

from __future__ import annotations

import sys
from typing import Any

from typer.core import TyperCommand

# The options without which a command does nothing with a script.
_NEEDED = {"simulate": ("layout", "devices")}


class ScriptCommand(TyperCommand):
    """A command whose arguments are a script and the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; options that the command needs may stand behind the script."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        needed = _NEEDED.get(ctx.info_name, ())
        if ctx.params.get("script") and not all(ctx.params.get(name) for name in needed):
            behind = self._behind(ctx)
            if any(option in behind for option in (f"--{name}" for name in needed)):
                ctx.params.clear()
                ctx.allow_interspersed_args = ctx.ignore_unknown_options = True
                return super().parse_args(ctx, given)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run, after a hint at options behind the script."""
        for option in self._behind(ctx):
            print(
                f"tutti: {option} stands behind the script, which takes it; for tutti "
                f"{ctx.info_name} put it before the script",
                file=sys.stderr,
            )
        return super().invoke(ctx)

    def _behind(self, ctx: Any) -> list[str]:
        """The command's own options among the script's arguments that were not given before the script."""
        mine = {
            option
            for param in self.params
            if ctx.params.get(param.name) == param.get_default(ctx)
            for option in param.opts
            if option not in ctx.help_option_names
        }
        words = (word.partition("=")[0] for word in ctx.params.get("script_args") or ())
        return [word for word in dict.fromkeys(words) if word in mine]
