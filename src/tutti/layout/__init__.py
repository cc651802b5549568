"""Meshes of ranks, shardings of tensors, and the text of a layout."""

from tutti.layout.layout import AXES, ZERO_AXES, Layout, split_order
from tutti.layout.mesh import Mesh
from tutti.layout.sharding import (
    Dim,
    Segment,
    Sharding,
    assemble,
    canonical,
    restricted,
    split_dim,
    united,
)

__all__ = [
    "AXES",
    "ZERO_AXES",
    "split_order",
    "Dim",
    "Layout",
    "Mesh",
    "Segment",
    "Sharding",
    "assemble",
    "canonical",
    "restricted",
    "split_dim",
    "united",
]
