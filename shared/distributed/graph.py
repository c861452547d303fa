"""The part of a graph that one process has: its own nodes, their in-edges, and the halo nodes that those come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor

from ..dropout import dropout_mask
from ..graph import Compressed, Graph, power_of_degrees
from ..graph_checks import as_device, check_choice, normal_tensors
from ..ops.graph import coo_to_csr, index_dtype
from .exchange import Coming, Halo, part_of, stacked, stays
from .process import Ranks

__all__ = ["DistGraph", "LocalGraph"]

Maps = Callable[[Tensor], Sequence[Tensor]]


class LocalGraph(Graph):
    """The bipartite graph from [own | halo] nodes to own nodes, that the kernels run on.

    Edges have local ids, by which edge tensors are indexed; ``numbers`` ``[E_p]`` (int64) are their ids in the whole
    graph, by which dropout draws, so that the mask does not depend on the partition.
    """

    def __init__(self, csr: Compressed, num_src: int, num_dst: int, numbers: Tensor, ranks: Ranks, kept=None):
        super().__init__(csr, None, num_src, num_dst, None, kept)
        self.numbers, self.ranks = numbers, ranks

    @property
    def numbered(self) -> Graph:
        """The same edges under their ids in the whole graph, for ops that draw and have no edge tensor."""
        return self.format("numbered", _numbered)

    @property
    def sides(self) -> tuple[Graph, Graph]:
        """The edges from own nodes, and those from halo nodes; without ids."""
        return self.format("sides", _sides)

    def draw(self, device) -> Tensor:
        """A seed ``[1]`` for dropout, drawn from torch's generator by rank 0, for all ranks."""
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
        self.ranks.agree("draws a seed")
        return self.ranks.of_first(seed)

    def dropout_scale(self, rate: float, heads: int, dtype: torch.dtype, seed: Optional[Tensor] = None) -> Tensor:
        """What dropout multiplies the attention of every edge by, ``[E_p, heads]``: 0 or ``1 / (1 - rate)``.

        Args:
            seed: int64 ``[1]``, the same on all ranks; None: drawn, as the mask of one process would be.
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
    """This process' part of a graph. Stands where a layer takes ``edge_index``, a DGLGraph or an ``edgeless.Graph``.

    All processes call the same layers in the same order, with the rows of their own nodes; the rows of halo nodes are
    fetched from their owners. Node tensors have ``num_own`` rows, edge tensors ``num_edges``, in the order of ``nodes``
    and ``edge_ids``. Made by :func:`edgeless.distributed.load`.

    Attributes:
        nodes: ids of the own nodes in the whole graph, ``[n]`` int64.
        edge_ids: ids of their in-edges in the whole graph, ``[E_p]`` int64, rising.
        ndata, edata: what was given to ``partition``, of own nodes and edges.
        rank, size: this process and the number of processes.
        total_nodes, total_edges: of the whole graph.
        fingerprint: of the partition.
        carrier: what brings rows of other processes, ``"all_to_all"`` or ``"symmetric"``; see :func:`load`.
        carrier_refusal: why it is not the latter, in words, where ``load(carrier="auto")`` would have taken it.
    """

    def __init__(self, local: LocalGraph, halo: Halo, about: dict, edge_ids: Tensor, kept_ids: Optional[Tensor]):
        """Of tensors on one device; ``about`` has nodes, halo_nodes, out_degrees, sizes and facts about the whole."""
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
        """From local ends of edges in rising order of their ids: own nodes count from 0, halo nodes go on."""
        num_own = halo.num_own
        num_src = num_own + halo.num_halo
        # Ids in the whole graph go through the kernels as well, added loops counted.
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
        """n, nodes of this process."""
        return self.halo.num_own

    num_src = num_dst = num_nodes = num_own  # a layer is given own rows for sources and destinations

    @property
    def num_halo(self) -> int:
        """h, nodes of others that edges to own nodes come from."""
        return self.halo.num_halo

    @property
    def num_edges(self) -> int:
        """E_p, in-edges of own nodes."""
        return self.local.num_edges

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def has_zero_in_degree(self) -> bool:
        """Whether some node of the whole graph has no in-edge: all ranks run the same path."""
        return self._about["zero_in_degree"]

    def in_degrees(self) -> Tensor:
        """Of own nodes ``[n]`` int64; all their in-edges are here."""
        return self.local.in_degrees()

    def out_degrees(self) -> Tensor:
        """Of own nodes in the whole graph, ``[n]`` int64."""
        return self._about["out_degrees"]

    def degree_scale(self, side: str, power: float, dtype: torch.dtype, isolated: float = 1.0) -> Tensor:
        """As :meth:`edgeless.Graph.degree_scale`, of own nodes."""
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
        """Begins to fetch the halo's rows of own ``rows`` ``[n, ...]``; several of one dtype travel as one.

        What is computed before ``wait()`` of the result hides the exchange, and that of its gradient on the way back.

        Args:
            join: whether ``wait()`` gives own and halo rows ``[n + h, ...]``, or the halo's ``[h, ...]``.
        """
        return Coming(self.halo, rows, join)

    def sources(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Own and halo rows ``[n + h, ...]`` of own ``rows``; not to be written to, as they may be kept."""
        return self.start(*rows).wait()

    def keeps(self, x: Tensor) -> bool:
        """Whether the halo's rows of ``x`` are fetched once and kept while ``x`` lives: it needs no gradient.

        Where no gradient is asked for at all every tensor is such, and only what is there already counts.
        """
        if self.size == 1 or x.layout is not torch.strided:
            return False
        return self.halo.keep_features is not False if stays(x) else self.halo.knows(x)

    def sends_input(self, x: Tensor, width: int, summed: bool = False) -> bool:
        """Whether a layer had better fetch rows of its input ``x`` ``[n, F]`` than ``width`` numbers made of each.

        Args:
            summed: whether foreign rows are summed as they come. Else they are mapped, and the map's gradient needs
                them until the backward.
        """
        if self.size == 1 or x.layout is not torch.strided:
            return False
        narrower, keep = x.size(-1) < width, self.halo.keep_features
        if summed or not stays(x):
            return narrower or self.keeps(x)
        # Kept they cost F numbers of memory for a foreign row, and what is made of them stands beside them until the
        # backward. What travels in their place costs two exchanges in every epoch, and memory only then.
        return (narrower or self.halo.carrier.keeps_features) if keep is None else keep

    def project_sources(self, x: Tensor, width: int, maps: Maps, others: Maps) -> tuple[Sequence, Sequence]:
        """``maps`` of own and halo nodes, and ``others`` of own nodes, which hide the exchange.

        Args:
            x: input of the layer ``[n, F]``.
            width: how many numbers ``maps`` makes of a row; :meth:`sends_input` says whether these travel or x does.
            maps, others: from a tensor of rows to several such tensors.
        """
        if self.sends_input(x, width):
            mapped = self._start_input(x, maps)
            found = others(x)
            return mapped(), found
        coming = self.start(*maps(x))
        found = others(x)
        return coming.wait(), found

    def map_sources(self, x: Tensor, maps: Maps) -> Sequence[Tensor]:
        """``maps`` of own and halo nodes, whose rows of ``x`` ``[n, F]`` travel."""
        return self._start_input(x, maps)()

    def _start_input(self, x: Tensor, maps: Maps) -> Callable[[], Sequence[Tensor]]:
        """Begins to fetch rows of ``x``; what it returns waits for them. Of features that stay only the halo's rows are
        kept: the caller has the own ones.
        """
        if not self.keeps(x):
            coming = self.start(x)
            return lambda: maps(*coming.wait())
        coming = self.start(x, join=False)
        return lambda: stacked(maps(x), maps(*coming.wait()))

    def gather(self, rows: Tensor) -> Tensor:
        """Own ``rows`` of all processes, ``[N, ...]`` in the order of the whole graph, on every process, detached."""
        ranks, sizes = self.halo.ranks, self._about["sizes"]
        if self._order is None:
            order = torch.empty(self.total_nodes, dtype=torch.int64, device=self.device)
            order[ranks.gather(self.nodes, sizes)] = torch.arange(self.total_nodes, device=self.device)
            self._order = order
        ranks.agree("gathers rows of", list(rows.shape[1:]), str(rows.dtype))
        return ranks.gather(rows.detach(), sizes)[self._order]

    # Other graphs ----------------------------------------------------------------------------------------------------

    def with_self_loops(self) -> DistGraph:
        """As :meth:`edgeless.Graph.with_self_loops`: the loops of own nodes are replaced by one each."""
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
        """This part on ``device``: itself when it is there already, else one whose carrier is ``"all_to_all"``."""
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
