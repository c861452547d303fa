"""Permutations of nodes: computed by a method or given by the user, applied to a graph, and undone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Optional, Union

import torch
from torch import Tensor

from ..checks import check_ids, check_integers, check_permutation, normal_tensors
from .methods import METHODS, check_options
from .neighbors import neighbors_of

# A set of sources, a set of destinations, and the ends of the edges between them as ids within their sets.
Relation = tuple[Hashable, Hashable, Tensor, Tensor]
Method = Union[str, Tensor, Mapping[Hashable, Tensor]]


def permutations(
    call: str,
    sizes: Mapping[Hashable, int],
    relations: Sequence[Relation],
    method: Method,
    num_parts: Optional[int] = None,
    seed: int = 0,
) -> dict[Hashable, Tensor]:
    """A permutation for every node set of a graph, int64 ``[size]``: the node that gets new id 0, 1, ...

    Args:
        call: the caller's name, for error messages.
        sizes: number of nodes of every set.
        relations: all edges of the graph. A method orders all sets together.
        method: a name in :data:`METHODS`; or a permutation, if there is one set; or permutations by set, where missing
            sets keep their order.
        num_parts, seed: as in :meth:`edgeless.Graph.reorder`.

    Example:
        >>> import torch
        >>> from edgeless import reordering
        >>> edges = ("papers", "papers", torch.tensor([0, 1, 2]), torch.tensor([2, 2, 0]))
        >>> reordering.permutations("example", {"papers": 3}, [edges], "degree")
        {'papers': tensor([2, 0, 1])}
    """
    check_options(call, method, num_parts, seed)
    with normal_tensors():
        if isinstance(method, str):
            return _found(call, sizes, relations, method, num_parts, seed)
        return _given(call, sizes, method)


def _found(call, sizes, relations, method, num_parts, seed) -> dict[Hashable, Tensor]:
    first, total = {}, 0
    for kind, size in sizes.items():
        first[kind], total = total, total + size
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    src, dst = [nothing], [nothing]
    for source, destination, *ends in relations:
        for kind, ids, into in ((source, ends[0], src), (destination, ends[1], dst)):
            check_ids(f"{call}: an edge", ids, "N", sizes[kind])
            into.append(ids.cpu().long() + first[kind])
    neighbors = neighbors_of(torch.cat(src), torch.cat(dst), total)
    if neighbors.indices.numel():
        order = METHODS[method](call, neighbors, num_parts, seed)
    else:  # the libraries do not support graphs without edges
        order = torch.arange(total, device="cpu")
    if len(sizes) == 1:
        return dict.fromkeys(sizes, order)
    return {kind: order[(order >= low) & (order < low + sizes[kind])] - low for kind, low in first.items()}


def _given(call: str, sizes: Mapping[Hashable, int], method) -> dict[Hashable, Tensor]:
    if isinstance(method, Tensor) and len(sizes) == 1:
        return {kind: _checked(call, "method", method, size) for kind, size in sizes.items()}
    if not isinstance(method, Mapping):
        names = ", ".join(map(repr, METHODS))
        raise TypeError(
            f"{call}: method must be one of {names}, a permutation for each of the graph's {len(sizes)} sets of nodes, "
            f"got {type(method).__name__}"
        )
    for kind in method:
        if kind not in sizes:
            raise ValueError(f"{call}: method must name sets of nodes of {list(sizes)}, got {kind!r}")
    return {
        kind: _checked(call, f"method[{kind!r}]", method[kind], size)
        if kind in method
        else torch.arange(size, device="cpu")
        for kind, size in sizes.items()
    }


def _checked(call: str, name: str, permutation, size: int) -> Tensor:
    """Checks that ``permutation`` is a permutation of ``size`` nodes, and returns it as int64."""
    check_integers(call, name, permutation, "[N]")
    if tuple(permutation.shape) != (size,):
        raise ValueError(f"{call}: {name} must have shape [N] = [{size}], got {list(permutation.shape)}")
    check_permutation(call, name, permutation, "N")
    return permutation.to(torch.int64)


def inverse(permutation: Tensor) -> Tensor:
    """The inverse permutation, ``[N]`` int64: the new id of every original node.

    Raises:
        TypeError, ValueError, IndexError: permutation is not a Tensor with the ids 0 to N - 1.

    Example:
        >>> import torch
        >>> from edgeless import reordering
        >>> reordering.inverse(torch.tensor([2, 0, 1]))
        tensor([1, 2, 0])
    """
    check_integers("inverse", "permutation", permutation, "[N]")
    permutation = _checked("inverse", "permutation", permutation, permutation.numel())
    numbers = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(numbers).scatter_(0, permutation, numbers)


def restore(out: Tensor, permutation: Tensor) -> Tensor:
    """Returns rows ``[N, ...]`` from the order of a reordered graph to the original order; differentiable.

    Raises:
        TypeError, ValueError, IndexError: permutation is not one from :meth:`edgeless.Graph.reorder`, or out has a
            different number of rows.

    Example:
        >>> import torch
        >>> from edgeless import reordering
        >>> x, permutation = torch.tensor([10.0, 11.0, 12.0]), torch.tensor([2, 0, 1])
        >>> x[permutation]
        tensor([12., 10., 11.])
        >>> reordering.restore(x[permutation], permutation)
        tensor([10., 11., 12.])
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"restore: out must be a Tensor, got {type(out).__name__}")
    back = inverse(permutation)
    if out.dim() == 0 or out.size(0) != back.numel():
        raise ValueError(f"restore: out must have N = {back.numel()} rows, got shape {list(out.shape)}")
    return out.index_select(0, back.to(out.device))


def reorder_graph(graph, method, num_parts: Optional[int], seed: int, bipartite: Optional[bool]):
    """See :meth:`edgeless.Graph.reorder`.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reordering
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [2, 2, 0]]))
        >>> reordered, permutation = reordering.reorder_graph(graph, "degree", None, 0, None)
        >>> permutation
        tensor([2, 0, 1])
    """
    call, num_src, num_dst = "Graph.reorder", graph.num_src, graph.num_dst
    if bipartite is not None and not isinstance(bipartite, bool):
        raise TypeError(f"{call}: bipartite must be True, False or None, got {type(bipartite).__name__}")
    if bipartite is False and num_src != num_dst:
        raise ValueError(f"{call}: bipartite=False needs as many sources as destinations, got {num_src} and {num_dst}")
    bipartite = num_src != num_dst if bipartite is None else bipartite
    kinds = ("src", "dst") if bipartite else ("src", "src")
    if bipartite and isinstance(method, (tuple, list)) and len(method) == 2:
        method = dict(zip(kinds, method))
    with normal_tensors():
        ends, sizes = graph._ends(), dict(zip(kinds, (num_src, num_dst)))
        found = permutations(call, sizes, [(*kinds, *ends)], method, num_parts, seed)
        found = {kind: permutation.to(graph.device) for kind, permutation in found.items()}
        new = [inverse(found[kind]).to(ids.dtype).index_select(0, ids) for kind, ids in zip(kinds, ends)]
        symmetric = None if bipartite else graph.is_symmetric
        options = {"is_symmetric": symmetric, "validate": False}
        reordered = graph._from_ends(call, ("source", "destination"), *new, num_src, num_dst, **options)
    return reordered, (found["src"], found["dst"]) if bipartite else found["src"]
