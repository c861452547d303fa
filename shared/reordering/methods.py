"""The reordering methods: each takes :class:`Neighbors` and returns the nodes ``[N]`` in their new order."""

from __future__ import annotations

import importlib
from typing import Optional

import torch
from torch import Tensor

from ..checks import check_choice
from .neighbors import Neighbors

_EXTRA = "pip install 'edgeless[reorder]'"
NODES_OF_A_PART = 512  # nodes per part of METIS, unless the caller gives the number of parts


def check_options(call: str, method, num_parts: Optional[int], seed: int) -> None:
    """Raises unless a method given by name exists and the options fit it."""
    if isinstance(method, str):
        check_choice(call, "method", method, tuple(METHODS))
    if num_parts is not None:
        if not isinstance(method, str) or method != "metis":
            got = repr(method) if isinstance(method, str) else "a permutation"
            raise ValueError(f"{call}: num_parts belongs to method 'metis', got {got}")
        _check_int(call, "num_parts", num_parts, 1)
    _check_int(call, "seed", seed, 0)


def _check_int(call: str, name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{call}: {name} must be an int, got {type(value).__name__}")
    if not least <= value < 2**31:
        raise ValueError(f"{call}: {name} must be at least {least} and below 2**31, got {value}")


def _library(call: str, method: str, module: str, package: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{call}: method {method!r} needs {package}; install it with: {_EXTRA}") from error


def _adjacency(call: str, method: str, neighbors: Neighbors):
    """The adjacency as a SciPy CSR matrix of ones."""
    sparse = _library(call, method, "scipy.sparse", "scipy")
    ones = torch.ones(neighbors.indices.numel(), dtype=torch.float32, device="cpu").numpy()
    arrays = (ones, neighbors.indices.numpy(), neighbors.indptr.numpy())
    return sparse.csr_matrix(arrays, shape=(neighbors.num_nodes, neighbors.num_nodes))


def degree(call: str, neighbors: Neighbors, num_parts: Optional[int], seed: int) -> Tensor:
    """Orders nodes by descending number of neighbours."""
    return neighbors.degrees.argsort(descending=True, stable=True)


def rcm(call: str, neighbors: Neighbors, num_parts: Optional[int], seed: int) -> Tensor:
    """SciPy's reverse Cuthill-McKee: small bandwidth where the graph allows it, as in meshes and road networks."""
    csgraph = _library(call, "rcm", "scipy.sparse.csgraph", "scipy")
    order = csgraph.reverse_cuthill_mckee(_adjacency(call, "rcm", neighbors), symmetric_mode=True)
    return torch.from_numpy(order.copy()).long()  # SciPy returns a view with a negative stride


def metis(call: str, neighbors: Neighbors, num_parts: Optional[int], seed: int) -> Tensor:
    """Orders nodes part by part, from a METIS partition that cuts few edges."""
    if num_parts is None:
        num_parts = -(-neighbors.num_nodes // NODES_OF_A_PART)
    return metis_parts(call, neighbors, min(num_parts, neighbors.num_nodes), seed, _EXTRA).argsort(stable=True)


def metis_parts(call: str, neighbors: Neighbors, num_parts: int, seed: int, remedy: str) -> Tensor:
    """The METIS part of every node, ``[N]`` int64; ``remedy`` ends the message if pymetis is missing."""
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(f"{call}: method 'metis' needs pymetis; install it with: {remedy}") from error
    adjacency = pymetis.CSRAdjacency(neighbors.indptr.numpy(), neighbors.indices.numpy())
    try:
        _, part = pymetis.part_graph(num_parts, adjacency, options=pymetis.Options(seed=seed))
    except RuntimeError as error:  # seen on a graph of 1.6 million nodes and 31 million edges
        raise RuntimeError(
            f"{call}: METIS failed to make {num_parts} parts of {neighbors.num_nodes} nodes ({error}); "
            "take another method, or another number of parts"
        ) from error
    return torch.as_tensor(part, dtype=torch.int64, device="cpu")


def community(call: str, neighbors: Neighbors, num_parts: Optional[int], seed: int) -> Tensor:
    """Orders nodes by community and, within one, by the communities merged into it, with scikit-network's Louvain.

    Louvain merges nodes into communities, these into larger ones, and so on. Each round runs separately to get all
    levels: a window of rows shares more neighbours if its nodes are of one small community, not just of a large one.
    """
    clustering = _library(call, "community", "sknetwork.clustering", "scikit-network")
    merged, of_node = _adjacency(call, "community", neighbors), None
    order = torch.arange(neighbors.num_nodes, device=neighbors.indptr.device)
    while True:
        louvain = clustering.Louvain(n_aggregations=1, return_probs=False)
        labels = torch.from_numpy(louvain.fit_predict(merged)).long()
        of_node = labels if of_node is None else labels[of_node]
        order = order[of_node[order].argsort(stable=True)]  # the largest communities, found last, sort first
        before, merged = merged.shape[0], louvain.aggregate_
        if merged.shape[0] in (1, before):
            return order


METHODS = {"community": community, "degree": degree, "metis": metis, "rcm": rcm}
