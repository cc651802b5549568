"""A graph as short, stable text that parses back.

%12: f32[8@data, 256, 512@tensor]       = linear(%11, layers.0.up.weight)    # model.py:41
%13: f32[8@data, 256, 512]{partial tensor} = linear(%12, layers.0.down.weight)
%14: f32[8@data, 256, 512]              = all_reduce(%13, tensor)            # model.py:42
"""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.ops.loop import loop
from tutti.layout import Sharding
from tutti.torch_private.op_tables import OpOverload, overload_name, schema_of

SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


@dataclass(frozen=True)
class Line:
    """One node: its value's name, type and sharding, the op, its arguments, and a comment."""

    name: str
    type: str
    op: str
    arguments: tuple[str, ...]
    comment: str = ""

    def __str__(self) -> str:
        left = f"%{self.name}: {self.type}"
        text = f"{left:<46} = {self.op}({', '.join(self.arguments)})"
        return f"{text:<96}  # {self.comment}" if self.comment else text


def type_text(val: Any, sharding: Sharding | None) -> str:
    """`f32[8@data, 512]{partial tensor}`: dtype, global dims with the axes that split them."""
    if not isinstance(val, Tensor):
        return "number" if not isinstance(val, list | tuple) else "several"
    sharding = sharding or Sharding.whole(val.shape)
    body, brace, rest = str(sharding).partition("{")
    return f"{SHORT.get(val.dtype, str(val.dtype))}[{body.strip()}]{brace}{rest}"


def op_name(node: fx.Node) -> str:
    """`mm` for `aten.mm.default`; other overloads keep their name: `sum.dim_IntList`."""
    if node.op == "placeholder":
        return "input"
    target = node.target
    if isinstance(target, OpOverload):
        name = schema_of(target).name.partition("::")[2]
        return name if overload_name(target) == "default" else f"{name}.{overload_name(target)}"
    if target is operator.getitem:
        return "item"
    return str(getattr(target, "__name__", target))


def lines(graph: fx.Graph) -> list[Line]:
    """Every node but the output, in order and numbered in this order."""
    names: dict[fx.Node, str] = {}
    found = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        named = node.meta.get("name")
        names[node] = named or str(len(names))
        arguments = [_argument(a, names) for a in node.args]
        arguments += [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
        if node.op == "get_attr":
            arguments = [str(node.target)]
        if node.target is loop:
            arguments[0] = _loop_text(node.args[0])
        kind = type_text(node.meta.get("val"), node.meta.get("sharding"))
        comment = os.path.basename(node.meta.get("source") or "")
        found.append(Line(names[node], kind, op_name(node), tuple(arguments), comment))
    return found


def _loop_text(body: Any) -> str:
    """The number of micro-batches and the parts of a loop: `4 x [0F, 0B]`."""
    return f"{body.num_micro} x [{', '.join(f'{s}{kind}' for s, kind in body.parts)}]"


def _argument(x: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(x, fx.Node):
        return f"%{names[x]}"
    if isinstance(x, tuple) and x and all(isinstance(a, str) for a in x):
        return "+".join(x)
    if isinstance(x, list | tuple):
        return f"[{', '.join(_argument(a, names) for a in x)}]"
    if isinstance(x, torch.dtype):
        return SHORT.get(x, str(x))
    if isinstance(x, str) and re.search(r"[,()\[\]#\s]", x):
        return repr(x)
    return str(x)


def text(graph: fx.Graph) -> str:
    """The whole graph, and below it the row and the parts of each of its loops."""
    blocks = [list(map(str, lines(graph)))]
    for node in graph.nodes:
        if node.target is loop:
            body: Any = node.args[0]
            blocks.append([f"# the row of {_loop_text(body)}: {' '.join(map(str, body.row))}"])
            for (stage, kind), part in body.parts.items():
                blocks.append([f"# part {stage}{kind}", *map(str, lines(part.graph))])
            for (stage, kind), part in body.last.items():
                blocks.append([f"# the last part {stage}{kind}", *map(str, lines(part.graph))])
    return "\n".join(line for block in blocks for line in block)


_LINE = re.compile(r"%(\S+): (.*?) *= ([\w.]+)\((.*?)\)(?: +# (\S.*))?")


def parse(source: str) -> list[Line]:
    """The lines of a text from `text`, those of loops' parts among them; `#` begins a comment.

    Raises `ValueError` with a line that it cannot read.
    """
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            raise ValueError(
                f"line {number} is not of the form %name: type = op(arguments): {line}"
            )
        name, kind, op, arguments, comment = match.groups()
        found.append(Line(name, kind, op, tuple(_top_level(arguments)), comment or ""))
    return found


def _top_level(arguments: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote, current = [], 0, "", ""
    for c in arguments:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "[(":
            depth += 1
        elif c in "])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(current.strip())
            current = ""
            continue
        current += c
    return [*parts, current.strip()] if current.strip() else parts
