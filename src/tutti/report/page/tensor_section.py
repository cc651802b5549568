"""The section of tensors: the mesh, and where each of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tutti.layout.mesh import Mesh
from tutti.quantities import format_nbytes
from tutti.report.page.blocks import Block, PictureBlock, Section, Words, table
from tutti.report.page.mesh_picture import (
    MOST_GROUPS,
    MOST_RANKS,
    draw_mesh,
    draw_places,
    groups_of,
)
from tutti.report.page.run_records import Event

MOST_TENSORS = 2_500


def tensors(facts: Event) -> Section | None:
    """The mesh, and where each tensor is."""
    rows = facts.get("tensors")
    if not rows:
        return None
    mesh = Mesh(tuple((str(a), int(n)) for a, n in facts.get("mesh", ())))
    groups = groups_of(rows)
    blocks: list[Block] = []
    if (grid := draw_mesh(mesh)) is not None:
        blocks.append(PictureBlock(grid, f"The mesh of ranks: {mesh}."))
    caption = (
        "A square is a tensor: dim 0 from top to bottom, another split dim from left to right. "
        "Its filled part is stored on the rank of the column."
    )
    if mesh.num_ranks > MOST_RANKS:
        caption += f" The first {MOST_RANKS} of {mesh.num_ranks} ranks."
    if len(groups) > MOST_GROUPS:
        caption += f" The {MOST_GROUPS} largest of {len(groups)} kinds; the table has all."
    blocks.append(PictureBlock(draw_places(mesh, groups), caption))
    blocks.append(_tensor_table(rows))
    if batch := facts.get("batch"):
        blocks.append(_batch_table(batch))
    if servers := facts.get("servers"):
        blocks.append(_server_table(servers))
    blocks += [
        Words(f"No rule, operands gathered whole: {x}", alert=True)
        for x in facts.get("fallbacks", ())
    ]
    return Section("tensors", "Mesh and tensors", tuple(blocks))


def _tensor_table(rows: Sequence[Mapping[str, Any]]) -> Block:
    """A row for each parameter and buffer, its optimizer's slots beside it."""
    slots: dict[str, list[Mapping[str, Any]]] = {}
    for r in rows:
        if r.get("owner"):
            slots.setdefault(str(r["owner"]), []).append(r)
    names = {str(r["name"]) for r in rows}
    shown = [
        _tensor_row(r, slots.get(str(r["name"]), [])) for r in rows if r.get("owner") not in names
    ]
    has_pipe = any(r.get("pipe") is not None for r in rows)
    head = [
        "tensor",
        "kind",
        "dtype",
        "shape",
        "stored",
        "computed",
        "per rank",
        "slots stored",
        "slots per rank",
        "note",
    ]
    if has_pipe:
        head.insert(6, "pipe")
    else:
        for row in shown:
            del row[6]
    numbers = [head.index("per rank"), head.index("slots per rank")]
    return table("Tensors of the state", head, shown, numbers, folded=True, most=MOST_TENSORS)


def _tensor_row(r: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> list[str]:
    stored = dict.fromkeys(str(x["stored"]) for x in own if x["shape"])
    return [
        str(r["name"]),
        str(r["kind"]),
        str(r["dtype"]),
        str(r["shape"]),
        str(r["stored"]),
        str(r["computed"]),
        ", ".join(map(str, r["pipe"])) if r.get("pipe") is not None else "all",
        format_nbytes(r["nbytes"]),
        " / ".join(stored),
        format_nbytes(sum(x["nbytes"] for x in own)) if own else "",
        str(r.get("reason", "")),
    ]


def _batch_table(batch: Sequence[Mapping[str, Any]]) -> Block:
    rows = [
        (b["name"], b["dtype"], b["shape"], b["given"], b["computed"], b.get("reason", ""))
        for b in batch
    ]
    return table("The batch", ("value", "dtype", "shape", "given", "computed", "note"), rows)


def _server_table(servers: Sequence[Mapping[str, Any]]) -> Block:
    rows = [
        (
            v["name"],
            v["shape"],
            ", ".join(map(str, v["servers"])),
            v["num_blocks"],
            format_nbytes(v["nbytes"]),
        )
        for v in servers
    ]
    head = ("variable", "shape", "servers", "blocks", "with slots")
    return table(
        "Variables on servers", head, rows, (3, 4), folded=len(rows) > 20, most=MOST_TENSORS
    )
