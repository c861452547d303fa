"""One process' part of a graph: its own nodes, their in-edges, and the halo nodes that these edges come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor

from ..checks import as_device, check_choice, normal_tensors
from ..functional.dropout import dropout_mask
from ..graph.handle import Compressed, Graph, power_of_degrees
from ..ops.graph import coo_to_csr, index_dtype
from .exchange import Coming, Halo, part_of, stacked, stays
from .process import Ranks

__all__ = ["DistGraph", "LocalGraph"]

Maps = Callable[[Tensor], Sequence[Tensor]]


class LocalGraph(Graph):
    """The bipartite graph from [own | halo] nodes to own nodes, which the kernels run on.

    Local edge ids index edge tensors; ``numbers`` ``[E_p]`` (int64) are the edges' ids in the whole graph. Dropout
    draws by the latter, so that its mask does not depend on the partition.
    """

    def __init__(self, csr: Compressed, num_src: int, num_dst: int, numbers: Tensor, ranks: Ranks, kept=None):
        super().__init__(csr, None, num_src, num_dst, None, kept)
        self.numbers, self.ranks = numbers, ranks

    @property
    def numbered(self) -> Graph:
        """The same edges with their ids in the whole graph, for ops that draw dropout and take no edge tensor."""
        return self.format("numbered", _numbered)

    @property
    def sides(self) -> tuple[Graph, Graph]:
        """The subgraphs of edges from own nodes and of edges from halo nodes, without edge ids."""
        return self.format("sides", _sides)

    def draw(self, device) -> Tensor:
        """A dropout seed ``[1]`` for all ranks, from rank 0's torch generator; every rank's generator advances."""
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
        self.ranks.agree("draws a seed")
        return self.ranks.of_first(seed)

    def dropout_scale(self, rate: float, heads: int, dtype: torch.dtype, seed: Optional[Tensor] = None) -> Tensor:
        """Dropout's factors of the attention weights, ``[E_p, heads]``: 0 or ``1 / (1 - rate)``.

        Args:
            seed: int64 ``[1]``, the same on all ranks; by default drawn by :meth:`draw`.
        """
        seed = self.draw(self.device) if seed is None else seed
        kept = dropout_mask(seed, self.num_edges, heads, rate, self.device, self.numbers)
        return kept.to(dtype) / (1 - rate if rate < 1 else 1)


def _numbered(graph: LocalGraph) -> Graph:
    def of_whole(one: Compressed) -> Compressed:
        return one._replace(edge_ids=graph.numbers[one.edge_ids.to(torch.int64)].to(one.indices.dtype))

    return Graph(of_whole(graph.csr), of_whole(graph.csc), graph.num_src, graph.num_dst)


def _sides(graph: LocalGraph) -> tuple[Graph, Graph]:
    own = graph.csr.indices < graph.num_dst
    halo = graph.num_src - graph.num_dst
    return part_of(graph, own, 0, graph.num_dst), part_of(graph, ~own, graph.num_dst, halo)


class DistGraph:
    """This process' part of a graph. Layers take it in place of ``edge_index``, a DGLGraph or an ``edgeless.Graph``.

    All processes call the same layers in the same order, with the rows of their own nodes; the rows of halo nodes are
    fetched from their owners. Node tensors have ``num_own`` rows, edge tensors ``num_edges``, in the order of ``nodes``
    and ``edge_ids``. Made by :func:`edgeless.distributed.load`.

    Attributes:
        nodes: ids of the own nodes in the whole graph, ``[n]`` int64.
        edge_ids: ids of their in-edges in the whole graph, ``[E_p]`` int64, ascending.
        ndata, edata: the node and edge data given to ``partition``, for own nodes and their in-edges.
        rank, size: this process' rank and the number of processes.
        total_nodes, total_edges: counts of the whole graph.
        fingerprint: fingerprint of the partition.
        carrier: the transport of halo rows, ``"all_to_all"`` or ``"symmetric"``; see :func:`load`.
        carrier_refusal: why ``load(carrier="auto")`` could not choose ``"symmetric"``; empty otherwise.

    Example:
        >>> import tempfile, torch
        >>> import edgeless.distributed as ed
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = ed.partition(edge_index, 4, 2, folder, method="contiguous")
        ...     dg = ed.load(folder)  # alone, a process takes all parts
        >>> dg.nodes, dg.edge_index().tolist()
        (tensor([0, 1, 2, 3]), [[0, 1, 2, 3], [1, 2, 3, 0]])
    """

    def __init__(self, local: LocalGraph, halo: Halo, about: dict, edge_ids: Tensor, kept_ids: Optional[Tensor]):
        """Takes tensors on one device. ``about``: nodes, halo_nodes, out_degrees, sizes and whole-graph facts."""
        self.local, self.halo, self._about = local, halo, about
        self.edge_ids, self._kept_ids = edge_ids, kept_ids
        self.nodes = about["nodes"]
        self.total_nodes, self.total_edges = about["total_nodes"], about["total_edges"]
        self.fingerprint = about["fingerprint"]
        self.ndata: dict[str, Tensor] = {}
        self.edata: dict[str, Tensor] = {}
        self._looped: Optional[DistGraph] = None
        self._scales: dict = {}
        self._order: Optional[Tensor] = None

    @classmethod
    def build(cls, src: Tensor, dst: Tensor, edge_ids: Tensor, kept_ids: Optional[Tensor], halo: Halo, about: dict):
        """Builds the part from the edges' local ends, in ascending order of edge ids; halo nodes follow own nodes."""
        num_own = halo.num_own
        num_src = num_own + halo.num_halo
        # The index dtype must also hold edge ids of the whole graph, with added self loops, which kernels take too.
        wide = index_dtype(about["total_nodes"] + about["total_edges"]) == torch.int64
        with normal_tensors():
            arrays = coo_to_csr(dst, src, num_own, num_src, False)
            csr = Compressed(*(t.to(torch.int64) if wide else t for t in arrays))
        return cls(LocalGraph(csr, num_src, num_own, edge_ids, halo.ranks), halo, about, edge_ids, kept_ids)

    # Facts -----------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.halo.ranks.rank

    @property
    def size(self) -> int:
        return self.halo.ranks.size

    @property
    def carrier(self) -> str:
        return self.halo.carrier.name

    @property
    def carrier_refusal(self) -> str:
        return self.halo.carrier.why

    @property
    def num_own(self) -> int:
        """n, the number of nodes that this process owns."""
        return self.halo.num_own

    num_src = num_dst = num_nodes = num_own  # layers take own rows as sources and as destinations

    @property
    def num_halo(self) -> int:
        """h, the number of other ranks' nodes that have edges to own nodes."""
        return self.halo.num_halo

    @property
    def num_edges(self) -> int:
        """E_p, the number of in-edges of own nodes."""
        return self.local.num_edges

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def has_zero_in_degree(self) -> bool:
        """True if some node of the whole graph has no in-edge, so that all ranks take the same path."""
        return self._about["zero_in_degree"]

    def in_degrees(self) -> Tensor:
        """In-degrees of own nodes, ``[n]`` int64; all their in-edges are local."""
        return self.local.in_degrees()

    def out_degrees(self) -> Tensor:
        """Out-degrees of own nodes in the whole graph, ``[n]`` int64."""
        return self._about["out_degrees"]

    def degree_scale(self, side: str, power: float, dtype: torch.dtype, isolated: float = 1.0) -> Tensor:
        """Does the same as :meth:`edgeless.Graph.degree_scale`, for own nodes."""
        key = (side, power, dtype, isolated)
        if key not in self._scales:
            check_choice("DistGraph.degree_scale", "side", side, ("src", "dst"))
            with normal_tensors():
                self._scales[key] = power_of_degrees(self, side, power, dtype, isolated)
        return self._scales[key]

    def edge_index(self) -> Tensor:
        """The own nodes' in-edges ``[2, E_p]`` int64, in ids of the whole graph."""
        src, dst = self.local.edge_index()
        return torch.stack((torch.cat((self.nodes, self._about["halo_nodes"]))[src], self.nodes[dst]))

    # Rows of others --------------------------------------------------------------------------------------------------

    def start(self, *rows: Tensor, join: bool = True) -> Coming:
        """Starts exchanging own ``rows`` ``[n, ...]`` for halo rows; tensors of one dtype share one exchange.

        Computation between this call and ``wait()`` on the result hides the exchange; its backward hides that of the
        gradients.

        Args:
            join: whether ``wait()`` returns own and halo rows ``[n + h, ...]``, or only halo rows ``[h, ...]``.
        """
        return Coming(self.halo, rows, join)

    def sources(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Own and halo rows ``[n + h, ...]`` for own ``rows``. They may be cached: do not modify them."""
        return self.start(*rows).wait()

    def keeps(self, x: Tensor) -> bool:
        """Returns whether the halo rows of ``x`` are fetched once and cached while ``x`` lives, since it needs no
        gradient.

        With gradients disabled no tensor needs one, so that only rows that are already cached count.
        """
        if self.size == 1 or x.layout is not torch.strided:
            return False
        return self.halo.keep_features is not False if stays(x) else self.halo.knows(x)

    def sends_input(self, x: Tensor, width: int, summed: bool = False) -> bool:
        """Returns whether a layer should exchange its input ``x`` ``[n, F]`` rather than mapped rows of ``width``
        columns.

        Args:
            summed: whether halo rows are summed without a map. Otherwise they are mapped, and the map's gradient needs
                them until the backward.
        """
        if self.size == 1 or x.layout is not torch.strided:
            return False
        narrower, keep = x.size(-1) < width, self.halo.keep_features
        if summed or not stays(x):
            return narrower or self.keeps(x)
        # Cached input rows take F columns of memory per halo row, beside the mapped rows that live until the backward.
        # Exchanging mapped rows costs two exchanges per epoch, and memory for them only from forward to backward.
        return (narrower or self.halo.carrier.keeps_features) if keep is None else keep

    def project_sources(self, x: Tensor, width: int, maps: Maps, others: Maps) -> tuple[Sequence, Sequence]:
        """``maps`` of own and halo rows, and ``others`` of own rows, whose computation hides the exchange.

        Args:
            x: input of the layer ``[n, F]``.
            width: columns of ``maps``' results; :meth:`sends_input` decides whether to exchange these or x.
            maps, others: functions from a tensor of rows to several tensors of rows.
        """
        if self.sends_input(x, width):
            mapped = self._start_input(x, maps)
            found = others(x)
            return mapped(), found
        coming = self.start(*maps(x))
        found = others(x)
        return coming.wait(), found

    def map_sources(self, x: Tensor, maps: Maps) -> Sequence[Tensor]:
        """``maps`` of own and halo rows, where the rows of ``x`` ``[n, F]`` are exchanged."""
        return self._start_input(x, maps)()

    def _start_input(self, x: Tensor, maps: Maps) -> Callable[[], Sequence[Tensor]]:
        """Starts the exchange of ``x`` and returns a function that waits for it and maps own and halo rows. Of constant
        features, only halo rows are cached, since the caller holds its own rows.
        """
        if not self.keeps(x):
            coming = self.start(x)
            return lambda: maps(*coming.wait())
        coming = self.start(x, join=False)
        return lambda: stacked(maps(x), maps(*coming.wait()))

    def gather(self, rows: Tensor) -> Tensor:
        """All processes' own ``rows``, ``[N, ...]`` in the order of the whole graph, on every process; detached."""
        ranks, sizes = self.halo.ranks, self._about["sizes"]
        if self._order is None:
            order = torch.empty(self.total_nodes, dtype=torch.int64, device=self.device)
            order[ranks.gather(self.nodes, sizes)] = torch.arange(self.total_nodes, device=self.device)
            self._order = order
        ranks.agree("gathers rows of", list(rows.shape[1:]), str(rows.dtype))
        return ranks.gather(rows.detach(), sizes)[self._order]

    # Other graphs ----------------------------------------------------------------------------------------------------

    def with_self_loops(self) -> DistGraph:
        """Replaces the self loops of each own node by a single one, as :meth:`edgeless.Graph.with_self_loops` does."""
        if self._looped is None:
            looped, about = self.local.with_self_loops(), dict(self._about)
            kept, loops = looped._kept, self.total_edges - about["total_loops"] + self.nodes
            ids = self.edge_ids if self._kept_ids is None else self._kept_ids
            numbers = torch.cat((ids if kept is None else ids[kept], loops))
            src, dst = self.local._ends()
            own_loops = torch.bincount(dst[src == dst].to(torch.int64), minlength=self.num_own)
            about["out_degrees"] = self.out_degrees() - own_loops + 1
            about["zero_in_degree"] = False
            about["total_edges"] += self.total_nodes - about["total_loops"]
            about["total_loops"] = self.total_nodes
            csr = looped.csr
            if self.local.index_dtype == torch.int64:
                csr = Compressed(*(t.to(torch.int64) for t in csr))
            local = LocalGraph(csr, looped.num_src, looped.num_dst, numbers, self.halo.ranks, kept)
            self._looped = DistGraph(local, self.halo, about, numbers, None)
        return self._looped

    @property
    def _kept(self) -> Optional[Tensor]:
        return self.local._kept

    def to(self, device) -> DistGraph:
        """This part on ``device``: itself if it is already there, else a copy whose carrier is ``"all_to_all"``."""
        device = as_device("DistGraph.to", device)
        if self.device == device:
            return self
        about = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self._about.items()}
        kept_ids = None if self._kept_ids is None else self._kept_ids.to(device)
        csr = Compressed(*(t.to(device) for t in self.local.csr))
        edge_ids, halo = self.edge_ids.to(device), self.halo.to(device)
        local = LocalGraph(csr, self.local.num_src, self.local.num_dst, edge_ids, halo.ranks)
        moved = DistGraph(local, halo, about, edge_ids, kept_ids)
        moved.ndata = {name: tensor.to(device) for name, tensor in self.ndata.items()}
        moved.edata = {name: tensor.to(device) for name, tensor in self.edata.items()}
        return moved

    def __repr__(self) -> str:
        carrier = f", carrier={self.carrier!r}" if self.size > 1 else ""
        return (
            f"DistGraph(rank={self.rank}, size={self.size}, num_own={self.num_own}, num_halo={self.num_halo}, "
            f"num_edges={self.num_edges}, total_nodes={self.total_nodes}, total_edges={self.total_edges}, "
            f"device={str(self.device)!r}{carrier})"
        )
