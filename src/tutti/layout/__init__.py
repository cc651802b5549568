"""Where tensors live: meshes of ranks, shardings of tensors, and the one line that lays a run out."""

from tutti.layout.layout import Layout
from tutti.layout.mesh import Mesh
from tutti.layout.sharding import Dim, Segment, Sharding, assemble, canonical, refines, split_dim

__all__ = [
    "Dim",
    "Layout",
    "Mesh",
    "Segment",
    "Sharding",
    "assemble",
    "canonical",
    "refines",
    "split_dim",
]
