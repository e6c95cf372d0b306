"""Tile graphs: build, order, simulate, bound, search, prove and lower them. NumPy only, never torch."""

from onewave.tiles.graph.graph import EdgeKind, Edges, Task, Tensor, Tile, TileGraph

__all__ = ["EdgeKind", "Edges", "Task", "Tensor", "Tile", "TileGraph"]
