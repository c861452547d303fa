"""``dgl.transforms`` with :class:`Reorder`, and :func:`restore`, which returns results to the original node order."""

from __future__ import annotations

__path__: list[str] = []  # a package from the start, whose inner modules edgeless.layers.stand_in finds

from typing import TYPE_CHECKING, Any, Optional

from torch import Tensor

from edgeless.layers.stand_in import stand_in
from edgeless.reordering import inverse
from edgeless.reordering import restore as restore_rows
from edgeless.reordering.transform import ReorderBase

from ._framework import DGLError, DGLGraph, heterograph, transforms
from .convert import to_graph

if TYPE_CHECKING:
    from dgl.transforms import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


__all__ = ["ORIGINAL", "Reorder", "restore"]

ORIGINAL = "original_node"  # name of the node data that hold the permutation


class Reorder(ReorderBase, transforms.BaseTransform):
    """Renumbers the nodes of a graph, so that near nodes are near in memory, and returns the new graph.

    Node data (features, labels, masks) are permuted with the nodes. Edges keep their order and ids, and so their data.
    Each node type of a heterograph gets a permutation of its own, computed from all types together.
    ``g.ndata["original_node"]`` holds the original id of every node; :func:`restore` uses it to return results to the
    original order. A second Reorder permutes these ids too, so they still refer to the first graph.

    Args:
        method: ``"community"``, ``"metis"``, ``"rcm"`` or ``"degree"``, see :meth:`edgeless.Graph.reorder`. Or a
            permutation ``[N]``; for a heterograph a dictionary of them by node type, in which types
            may be left out.
        num_parts, seed: as in :meth:`edgeless.Graph.reorder`.
    Raises:
        TypeError: on call, if g is not a DGLGraph.
        dgl.DGLError: on call, for blocks and batches, whose node order has a meaning.
        TypeError, ValueError, IndexError: on call, for a method or permutation that does not fit.
        ImportError: the method's library is missing.

    Example:
        >>> import dgl
        >>> from edgeless.dgl.transforms import Reorder
        >>> Reorder("degree")(dgl.graph(([0, 1, 2], [2, 2, 0]))).ndata["original_node"]
        tensor([2, 0, 1])
    """

    def __call__(self, g: DGLGraph) -> DGLGraph:
        """The graph in its new order; ``g`` is not changed."""
        if not isinstance(g, DGLGraph):
            raise TypeError(f"Reorder: g must be a DGLGraph, got {type(g).__name__}")
        if g.is_block:
            raise DGLError("Reorder: g is a block, whose destinations must stay the first of its sources")
        if g.batch_size > 1:
            raise DGLError("Reorder: g is a batch, whose graphs must stay apart: reorder them before batching")
        sizes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
        edges = {etype: to_graph(g, etype).edge_index().to(g.idtype) for etype in g.canonical_etypes}
        relations = [(etype[0], etype[2], *ends) for etype, ends in edges.items()]
        found = self._permutations(sizes, relations)
        found = {ntype: permutation.to(g.device) for ntype, permutation in found.items()}
        numbers = {ntype: inverse(permutation).to(g.idtype) for ntype, permutation in found.items()}
        new = {
            etype: (numbers[etype[0]][ends[0].long()], numbers[etype[2]][ends[1].long()])
            for etype, ends in edges.items()
        }
        reordered = heterograph(new, sizes, idtype=g.idtype, device=g.device)
        reordered = reordered.formats([format for group in g.formats().values() for format in group])
        for ntype, permutation in found.items():
            data = reordered.nodes[ntype].data
            for name, value in g.nodes[ntype].data.items():
                data[name] = value.index_select(0, permutation)
            if ORIGINAL not in data:
                data[ORIGINAL] = permutation
        for etype in edges:
            for name, value in g.edges[etype].data.items():
                reordered.edges[etype].data[name] = value
        return reordered


def restore(out: Tensor, g: DGLGraph, ntype: Optional[str] = None) -> Tensor:
    """Returns rows ``[N, ...]`` of a reordered graph's nodes to the order before :class:`Reorder`; differentiable.

    Args:
        ntype: the node type of the rows; optional if the graph has only one.
    Raises:
        KeyError: the graph was not reordered.
        dgl.DGLError: ntype is not one of its node types, or is needed and missing.
        TypeError, ValueError, IndexError: the number of rows is wrong, or the graph has lost some of the nodes.

    Example:
        >>> import dgl, torch
        >>> from edgeless.dgl.transforms import Reorder, restore
        >>> graph = dgl.graph(([0, 1, 2], [2, 2, 0]))
        >>> graph.ndata["x"] = torch.tensor([0.0, 1.0, 2.0])
        >>> reordered = Reorder("degree")(graph)
        >>> restore(reordered.ndata["x"], reordered)
        tensor([0., 1., 2.])
    """
    if ntype is None and len(g.ntypes) != 1:
        raise DGLError(f"restore: ntype must be one of {g.ntypes}, got None")
    data = g.nodes[g.ntypes[0] if ntype is None else ntype].data
    if ORIGINAL not in data:
        raise KeyError(f"restore: g must have the node data {ORIGINAL}, which Reorder writes")
    return restore_rows(out, data[ORIGINAL])


stand_in(__name__, "dgl.transforms")
