"""``torch_geometric.transforms`` with :class:`Reorder`, and :func:`restore`, which returns results to the old order."""

from __future__ import annotations

__path__: list[str] = []  # a package from the start, whose inner modules edgeless.layers.stand_in finds

from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.transforms import BaseTransform
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_sparse, select

from edgeless.checks import check_ids, plain_tensor
from edgeless.layers.stand_in import stand_in
from edgeless.reordering import inverse
from edgeless.reordering import restore as restore_rows
from edgeless.reordering.transform import ReorderBase

if TYPE_CHECKING:
    from torch_geometric.transforms import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


__all__ = ["ORIGINAL", "Reorder", "restore"]

ORIGINAL = "original_node"  # PyG infers the number of nodes from attributes with "node" in their names


class Reorder(ReorderBase, BaseTransform):
    """Renumbers the nodes of a ``Data`` or ``HeteroData``, so that near nodes are near in memory.

    Features, labels, masks and all other node attributes, by PyG's rule, are permuted with the nodes. Tensors of node
    ids (``edge_index``, ``edge_label_index``, ``face``, ...) get the new ids. The edges of an ``edge_index`` keep their
    order, so edge attributes do not change. A ``SparseTensor`` or ``torch.sparse`` matrix is permuted with its values.
    Attributes of the whole graph do not change. In a HeteroData each node type gets a permutation of its own, computed
    from all types together.

    ``data.original_node`` holds the original id of every node; :func:`restore` uses it to return results to the
    original order. A second Reorder permutes these ids too, so they still refer to the first data.

    Args:
        method: ``"community"``, ``"metis"``, ``"rcm"`` or ``"degree"``, see :meth:`edgeless.Graph.reorder`. Or a
            permutation ``[N]``; for a HeteroData a dictionary of them by node type, in which types
            may be left out.
        num_parts, seed: as in :meth:`edgeless.Graph.reorder`.
    Raises:
        TypeError, ValueError, IndexError: on call, if data is no data object or is a Batch (reorder its graphs before
            they are batched), or for a permutation that does not fit.
        ImportError: the method's library is missing.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from edgeless.pyg.transforms import Reorder
        >>> data = Data(x=torch.tensor([[0.0], [1.0], [2.0]]), edge_index=torch.tensor([[0, 1, 2], [2, 2, 0]]))
        >>> Reorder("degree")(data).original_node
        tensor([2, 0, 1])
    """

    def forward(self, data: Union[Data, HeteroData]) -> Union[Data, HeteroData]:
        """Reorders ``data`` in place; the caller, PyG's BaseTransform, has made a shallow copy."""
        if not isinstance(data, (Data, HeteroData)):
            raise TypeError(f"Reorder: data must be a Data or a HeteroData, got {type(data).__name__}")
        if isinstance(data, Batch):
            raise ValueError("Reorder: data is a Batch, whose graphs must stay apart: reorder them before batching")
        sizes = {store._key: store.num_nodes for store in data.node_stores}  # the store of a Data has the key None
        for kind, size in sizes.items():
            if size is None:
                raise ValueError(f"Reorder: data must say how many nodes{_of(kind)} it has: set num_nodes")
        relations = [(*_ends_of(store), *edges) for store in data.edge_stores for edges in _edges(store)]
        found = self._permutations(sizes, relations)
        numbers = {kind: inverse(permutation) for kind, permutation in found.items()}
        # Write only after everything is read: PyG may infer the number of nodes from the largest id.
        stores = {id(store): store for store in (*data.node_stores, *data.edge_stores)}.values()
        changes = [(store, _reordered(data, store, found, numbers)) for store in stores]
        for store, changed in changes:
            store.update(changed)
        device = _device(data)
        for store in data.node_stores:
            if ORIGINAL not in store:
                store[ORIGINAL] = found[store._key].to(device)
        return data


def restore(out: Tensor, data: Union[Data, HeteroData], node_type: Optional[str] = None) -> Tensor:
    """Returns rows ``[N, ...]`` of reordered ``data``'s nodes to the order before :class:`Reorder`; differentiable.

    Args:
        node_type: the node type of the rows, for a HeteroData.
    Raises:
        KeyError: data was not reordered, or has no such node type.
        TypeError, ValueError, IndexError: the number of rows is wrong, or the data has lost some of the nodes.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from edgeless.pyg.transforms import Reorder, restore
        >>> data = Data(x=torch.tensor([[0.0], [1.0], [2.0]]), edge_index=torch.tensor([[0, 1, 2], [2, 2, 0]]))
        >>> reordered = Reorder("degree")(data)
        >>> restore(reordered.x, reordered).tolist()
        [[0.0], [1.0], [2.0]]
    """
    if isinstance(data, HeteroData):
        if node_type not in data.node_types:
            raise KeyError(f"restore: node_type must be one of {data.node_types}, got {node_type!r}")
        store = data[node_type]
    else:
        store = data
    if ORIGINAL not in store:
        raise KeyError(f"restore: data must have {ORIGINAL}{_of(node_type)}, which Reorder writes")
    return restore_rows(out, store[ORIGINAL])


def _of(kind: Optional[str]) -> str:
    return "" if kind is None else f" of type {kind!r}"


def _ends_of(store) -> tuple[Optional[str], Optional[str]]:
    """The node types of sources and destinations, None for the nodes of a Data."""
    return (None, None) if store._key is None else (store._key[0], store._key[2])


def _reordered(data, store, found: dict, numbers: dict) -> dict[str, Any]:
    """The changed entries of a store: node attributes, node ids, and matrices of nodes by nodes."""
    changed = {}
    for key, value in store.items():
        if isinstance(store, EdgeStorage):
            ends = _ends_of(store)
            if _is_matrix(key, value):
                rows, cols = reversed(ends) if key.startswith("adj_t") else ends
                changed[key] = _permuted(value, found[rows], found[cols], numbers[rows], numbers[cols])
                continue
            if _holds_ids(data, store, key, value, [found[end].numel() for end in ends]):
                changed[key] = _renumbered(f"data.{key}", value, [numbers[end] for end in ends])
                continue
        if isinstance(store, NodeStorage) and _is_of_nodes(store, key, value, found[store._key].numel()):
            changed[key] = _selected(value, found[store._key], data.__cat_dim__(key, value, store))
    return changed


def _device(data) -> torch.device:
    tensors = (value for store in data.stores for value in store.values() if isinstance(value, Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _edges(store) -> list[tuple[Tensor, Tensor]]:
    """Sources and destinations of the store's edges, as a list of one; empty if it has no edges."""
    if "edge_index" in store and not is_sparse(store.edge_index):
        src, dst = plain_tensor(store.edge_index)
        return [(src, dst)]
    for key, value in store.items():
        if _is_matrix(key, value):
            if isinstance(value, SparseTensor):
                row, col, _ = value.coo()
            else:
                row, col = value.to_sparse_coo()._indices()[:2]
            return [(col, row) if key.startswith("adj_t") else (row, col)]
    return []


def _is_matrix(key: str, value: Any) -> bool:
    """True if both dimensions of ``value`` are nodes."""
    if is_sparse(value):
        return "adj" in key or "edge_index" in key  # PyG's own rule
    return key in ("adj", "adj_t") and isinstance(value, Tensor) and value.dim() >= 2


def _holds_ids(data, store, key: str, value: Any, sizes: list[int]) -> bool:
    """True if ``value`` holds node ids: PyG increments these when it batches graphs."""
    if not isinstance(store, EdgeStorage) or not isinstance(value, Tensor) or "batch" in key:
        return False
    if value.dtype is torch.bool or value.is_floating_point() or value.is_complex() or not value.numel():
        return False
    by = torch.as_tensor(data.__inc__(key, value, store)).flatten().tolist()
    if not any(by):
        return False
    if by not in (sizes, sizes[:1]):
        raise ValueError(f"Reorder: data.{key} must hold ids of nodes, but its __inc__ is {by} with {sizes[0]} nodes")
    return True


def _renumbered(name: str, ids: Tensor, numbers: list[Tensor]) -> Tensor:
    """Maps old ids to new ones; for a relation between two node types, ids have one row per end."""
    plain = plain_tensor(ids)
    if numbers[0] is numbers[1]:
        rows = (plain,)
    elif plain.size(0) == 2:
        rows = plain.unbind(0)
    else:
        raise ValueError(f"Reorder: {name} must have shape [2, ...], got {list(plain.shape)}")
    mapped = []
    for row, number in zip(rows, numbers):
        check_ids(f"Reorder: {name}", row.flatten(), "N", number.numel())
        mapped.append(number.to(row.device, row.dtype)[row.long()])
    out = torch.stack(mapped) if len(rows) == 2 else mapped[0]
    if isinstance(ids, EdgeIndex):  # the new ids are not sorted
        return EdgeIndex(out, sparse_size=ids.sparse_size(), is_undirected=ids.is_undirected)
    return out


def _permuted(matrix, rows: Tensor, cols: Tensor, row_numbers: Tensor, col_numbers: Tensor):
    """A matrix of nodes by nodes with its rows and columns in their new order."""
    if isinstance(matrix, SparseTensor):
        device = matrix.device()
        return matrix.index_select(0, rows.to(device)).index_select(1, cols.to(device))
    if matrix.layout is torch.strided:
        return matrix.index_select(0, rows.to(matrix.device)).index_select(1, cols.to(matrix.device))
    coo = matrix.to_sparse_coo()
    row, col, *rest = coo._indices()
    moved = torch.stack((row_numbers.to(row.device)[row], col_numbers.to(col.device)[col], *rest))
    moved = torch.sparse_coo_tensor(moved, coo._values(), coo.shape)
    moved = moved.coalesce() if coo.is_coalesced() else moved
    return moved if matrix.layout is torch.sparse_coo else moved.to_sparse(layout=matrix.layout)


def _is_of_nodes(store, key: str, value: Any, size: int) -> bool:
    """True if ``value`` has a row for every node: a node attribute by PyG's own rule, or sparse features."""
    if key == "num_nodes":
        return False
    return value.size(0) == size if isinstance(value, SparseTensor) else store.is_node_attr(key)


def _selected(value: Any, permutation: Tensor, dim: int) -> Any:
    """The entries of a node attribute in their new order."""
    if isinstance(value, np.ndarray):
        return value.take(permutation.numpy(), axis=dim)
    if isinstance(value, SparseTensor):
        return value.index_select(dim, permutation.to(value.device()))
    if isinstance(value, Tensor):
        permutation = permutation.to(value.device)
        if value.layout is not torch.strided:
            coo = value.to_sparse_coo().index_select(dim, permutation)
            return coo if value.layout is torch.sparse_coo else coo.to_sparse(layout=value.layout)
    chosen = select(value, permutation, dim)
    return tuple(chosen) if isinstance(value, tuple) else chosen


stand_in(__name__, "torch_geometric.transforms")
