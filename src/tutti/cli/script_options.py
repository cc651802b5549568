"""Commands with a script: an argument behind it belongs to the script, with a hint if it looks like an option
of the command.

    tutti plan --devices "64 x h100" train.py --lr 0.1         --lr is the script's
    tutti simulate train.py --layout ... --devices ...         both are needed: the command's
    tutti plan -m project.train --lr 0.1                       a module, as python -m takes it
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tutti.launch.script import Script

# The parameters of every command with a script.
SCRIPT = typer.Argument(
    parser=Script, metavar="SCRIPT", help="A Python script, or with -m a module."
)
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on as they are.")
]
IsModule = Annotated[
    bool, typer.Option("-m", help="SCRIPT is the name of a module, as with python -m.")
]

_IMPORTED = re.compile(r"^\s*(?:from|import)\s+(\w[\w.]*)", re.MULTILINE)
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
                rest = super().parse_args(ctx, given)
        if ctx.params.get("script"):
            ctx.params["script"] = _checked(ctx.params["script"], ctx.params["is_module"])
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run, after a hint at options behind the script that it does not seem to have."""
        behind = self._behind(ctx)
        texts = _own_texts(ctx.params["script"]) if behind else []
        for option in behind:
            if any(option in text for text in texts):
                continue  # the script has an option of this name
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
            if param.name != "is_module"  # -m is an option of many scripts
            if ctx.params.get(param.name) == param.get_default(ctx)
            for option in param.opts
            if option not in ctx.help_option_names
        }
        words = (word.partition("=")[0] for word in ctx.params.get("script_args") or ())
        return [word for word in dict.fromkeys(words) if word in mine]


def _own_texts(script: Script) -> list[str]:
    """The text of a script, and of the modules beside it that it imports: they name the options it takes."""
    folder, name = Path(script.folder), script.name
    path = folder.joinpath(*name.split(".")).with_suffix(".py") if script.is_module else Path(name)
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    found = [text]
    for module in dict.fromkeys(_IMPORTED.findall(text)):
        beside = folder.joinpath(*module.split(".")).with_suffix(".py")
        if beside.is_file():
            found.append(beside.read_text(errors="replace"))
    return found


def _checked(script: Script, is_module: bool) -> Script:
    """The script, if there is a file of this name, or it can be the name of a module."""
    path = Path(script.name)
    if (
        is_module
        and all(part.isidentifier() for part in script.name.split("."))
        and path.suffix != ".py"
    ):
        return replace(script, is_module=True)
    if is_module:
        fix = ".".join(path.with_suffix("").parts)
        raise typer.BadParameter(
            f"'{script}' is not the name of a module; try '-m {fix}'.", param_hint="SCRIPT"
        )
    if not path.is_file():
        wrong = "is a directory" if path.is_dir() else "does not exist"
        raise typer.BadParameter(f"File '{script}' {wrong}.", param_hint="SCRIPT")
    return script
