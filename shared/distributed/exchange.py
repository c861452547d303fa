"""The exchange of halo rows, which a process reads from their owners, and of their gradients, which it returns.

Every rank packs the rows that others need, ordered by receiver, and a carrier delivers them. Packing is a sum over a
graph with one edge per row sent; its transpose sums the returned gradients in a fixed order. An exchange is two nodes
of autograd, a start and a wait, and computation between them hides it. In the backward, the wait's node sends the
gradients of halo rows and the start's node receives them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ..checks import FLOATS, normal_tensors
from ..graph.handle import Compressed, Graph
from ..ops import spmm as _spmm  # noqa: F401  registers the fake kernels of the op
from ..untraced import untraced
from .carriers import AllToAll
from .process import Ranks


class Halo:
    """The send and receive lists of this rank, and its cache of halo rows.

    Args:
        num_own: n, rows of this rank.
        sent: ids ``[S]`` (int64) of the own rows that this rank sends, ordered by receiver.
        num_sent, num_received: numbers of rows sent to and received from every rank.
        keep_features: whether halo rows of features that need no gradient are cached; None: the carrier decides.

    Attributes:
        carrier: transports the rows, see :mod:`edgeless.distributed.carriers`.
    """

    def __init__(
        self,
        ranks: Ranks,
        num_own: int,
        sent: Tensor,
        num_sent: list[int],
        num_received: list[int],
        keep_features: Optional[bool] = None,
    ):
        self.ranks, self.keep_features = ranks, keep_features
        self.num_own, self.num_halo = num_own, sum(num_received)
        self.num_sent, self.num_received = num_sent, num_received
        self.sent = sent
        self.carrier = AllToAll(ranks)
        self._pack: Optional[Graph] = None
        self._kept: dict = {}  # (id of a tensor, join) -> (weak reference, version, received rows)

    @property
    def pack(self) -> Graph:
        """The graph from own rows to rows sent; its transpose sums the returned gradients."""
        if self._pack is None:
            with normal_tensors():
                indptr = torch.arange(self.sent.numel() + 1, device=self.sent.device)
                self._pack = Graph.from_csr(indptr, self.sent, self.num_own, validate=False)
                _ = self._pack.csc
        return self._pack

    def to(self, device) -> Halo:
        """The same halo on ``device``, with an empty cache and an all-to-all carrier."""
        sent = self.sent.to(device)
        return Halo(self.ranks, self.num_own, sent, self.num_sent, self.num_received, self.keep_features)

    # Exchanges -------------------------------------------------------------------------------------------------------

    @untraced  # an exchange in flight is not a tensor: torch.compile breaks the graph here and at the wait
    def start(self, rows: Tensor, join: bool) -> Flight:
        """Starts the exchange of own ``rows`` ``[n, ...]`` for halo rows.

        Args:
            join: whether :meth:`Flight.wait` returns own and halo rows together, ``[n + h, ...]``.
        Raises:
            ValueError: rows does not have n rows.
            RuntimeError: on every rank, if the ranks are about to exchange different shapes, dtypes or gradients.
        """
        if rows.size(0) != self.num_own:
            raise ValueError(
                f"edgeless.distributed: features must have one row for each of this process' {self.num_own} nodes, got "
                f"shape {list(rows.shape)}"
            )
        flight = Flight(self, join)
        if self.ranks.size == 1:
            flight.here = rows if join else rows.new_empty(0, *rows.shape[1:])
            return flight
        keep = self.keep_features is not False and stays(rows)
        if (kept := self._find(rows, join)) is not None:
            flight.here = kept
            return flight
        if self.ranks.checks:
            need = "a" if rows.requires_grad else "no"
            self.ranks.agree("sends rows of", list(rows.shape[1:]), str(rows.dtype), "that need", need, "gradient")
        flight.coming = _Start.apply(rows, flight)
        if keep:
            flight.keep = rows
        return flight

    def knows(self, rows: Tensor) -> bool:
        """Returns whether the halo's rows are cached for the tensor ``rows``, alone or joined with own rows."""
        return any(self._find(rows, join) is not None for join in (False, True))

    def _find(self, rows: Tensor, join: bool) -> Optional[Tensor]:
        """The cached result of an earlier exchange of the same, unmodified tensor, which needs no gradient; or None."""
        found = None if rows.requires_grad or rows.is_inference() else self._kept.get((id(rows), join))
        if found is None:
            return None
        reference, version, received = found
        return received if reference() is rows and rows._version == version else None

    def remember(self, rows: Tensor, join: bool, received: Tensor) -> None:
        """Caches the received rows for as long as ``rows`` lives."""
        key, kept = (id(rows), join), self._kept

        def forget(reference, key=key, kept=kept):
            if key in kept and kept[key][0] is reference:
                del kept[key]

        kept[key] = (weakref.ref(rows, forget), rows._version, received)

    def forget(self) -> None:
        """Drops all cached halo rows and the carrier's memory. All ranks call it at the same place of their program."""
        self._kept.clear()
        self.carrier.forget()

    def packed(self, rows: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """The rows to send, ``[S, ...]``; written to ``out``, contiguous, if given."""
        if rows.dtype not in FLOATS:
            return torch.index_select(rows, 0, self.sent, out=out)
        flat, csr = _flat(rows), self.pack.csr_arrays(False)
        if out is not None:
            torch.ops.edgeless.spmm_into(_flat(out), flat, csr, [1])
            return out
        out = torch.ops.edgeless.spmm(flat, None, None, None, csr, [], rows.dtype, [1])
        return out.view(out.size(0), *rows.shape[1:])

    def summed(self, returned: Tensor) -> Tensor:
        """The returned gradients of the rows sent, ``[S, ...]``, summed per own row, ``[n, ...]``."""
        flat = _flat(returned)
        out = torch.ops.edgeless.spmm(flat, None, None, None, self.pack.csc_arrays(False), [], returned.dtype, [])
        return out.view(out.size(0), *returned.shape[1:])

    def receive(self, rows: Tensor) -> Tensor:
        """Halo rows ``[h, ...]`` of any dtype, at once and without gradients."""
        out = rows.new_empty(self.num_halo, *rows.shape[1:])
        if self.ranks.size > 1:
            self.carrier.arrive(self.carrier.send(self, rows, out))
        return out


class Flight:
    """One exchange in flight, and its return in the backward."""

    def __init__(self, halo: Halo, join: bool):
        self.halo, self.join = halo, join
        self.here: Optional[Tensor] = None  # the result, where it is available without an exchange
        self.coming: Optional[Tensor] = None
        self.keep: Optional[Tensor] = None  # own rows under which to cache the received rows
        self._way = None  # the carrier's handle of the exchange

    @untraced
    def wait(self) -> Tensor:
        """Halo rows ``[h, ...]``, or own and halo rows ``[n + h, ...]``. They may be cached: do not modify them."""
        if self.here is not None:
            return self.here
        received, self.coming = _Wait.apply(self.coming, self), None
        if self.keep is not None:
            self.halo.remember(self.keep, self.join, received)
            self.keep = None
        return received

    def send(self, rows: Tensor) -> Tensor:
        halo = self.halo
        before = halo.num_own if self.join else 0
        out = rows.new_empty(before + halo.num_halo, *rows.shape[1:])
        self._way = halo.carrier.send(halo, rows, out[before:])
        if self.join:
            out[:before].copy_(rows)
        return out

    def arrive(self) -> None:
        way, self._way = self._way, None
        self.halo.carrier.arrive(way)

    def send_back(self, grad: Tensor) -> None:
        halo = self.halo
        grad = grad[halo.num_own :] if self.join else grad
        if halo.ranks.checks:
            halo.ranks.agree("returns gradients of", list(grad.shape[1:]), str(grad.dtype))
        self._way = halo.carrier.send_back(halo, grad.contiguous())

    def come_back(self, grad: Tensor) -> Tensor:
        way, self._way = self._way, None
        total = self.halo.carrier.come_back(self.halo, way)
        return total.add_(grad[: self.halo.num_own]) if self.join else total


class Coming:
    """The halo's rows of several tensors, as one exchange where they have one dtype; see ``DistGraph.start``."""

    def __init__(self, halo: Halo, rows: tuple[Tensor, ...], join: bool):
        self._joined = None
        if len(rows) > 1 and halo.ranks.size > 1 and len({t.dtype for t in rows}) == 1:
            self._joined = [t.shape[1:] for t in rows]
            rows = (torch.cat([_flat(t) for t in rows], dim=1),)
        self._flights = [halo.start(t, join) for t in rows]

    def wait(self) -> tuple[Tensor, ...]:
        """The result of ``Flight.wait`` for every tensor."""
        arrived = tuple(flight.wait() for flight in self._flights)
        if self._joined is None:
            return arrived
        return tuple(_columns(arrived[0], self._joined))


def stacked(own: Sequence[Tensor], halo: Sequence[Tensor]) -> list[Tensor]:
    """Concatenates own rows ``[n, ...]`` and halo rows ``[h, ...]`` to ``[n + h, ...]``, for several tensors.

    If all have one dtype and row shape, as keys and values do, the results are columns of one tensor.
    """
    if len({(t.dtype, t.shape[1:]) for t in own}) > 1:
        return [torch.cat(pair) for pair in zip(own, halo)]
    return _columns(_Stack.apply(len(own), *own, *halo), [t.shape[1:] for t in own])


class _Stack(torch.autograd.Function):
    """Writes all parts in one pass; ``torch.cat`` of rows and then of columns takes two, and twice the memory."""

    @staticmethod
    def forward(ctx, count, *rows):
        ctx.shapes = [t.shape for t in rows]
        heights, widths = (rows[0].size(0), rows[-1].size(0)), [t.shape[1:].numel() for t in rows[:count]]
        out = rows[0].new_empty(sum(heights), sum(widths))
        for of, side in zip(out.split(heights), (rows[:count], rows[count:])):
            for columns, t in zip(of.split(widths, dim=1), side):
                columns.copy_(_flat(t))
        ctx.heights, ctx.widths = heights, widths
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        parts = [part for of in grad.split(ctx.heights) for part in of.split(ctx.widths, dim=1)]
        return None, *(part.reshape(shape) for part, shape in zip(parts, ctx.shapes))


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, flight):
        ctx.flight = flight
        return flight.send(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.flight.come_back(grad), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, coming, flight):
        ctx.flight = flight
        flight.arrive()
        return coming.view_as(coming)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.flight.send_back(grad)
        return grad, None


def stays(rows: Tensor) -> bool:
    """Returns whether training does not change these features, so that every epoch needs the same halo rows."""
    return torch.is_grad_enabled() and not rows.requires_grad and not rows.is_inference()


def _flat(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 2 else rows.reshape(rows.size(0), rows.shape[1:].numel())


def _columns(rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Splits concatenated columns, each flattened by :func:`_flat`, back into tensors ``[N, *shape]``."""
    columns = rows.split([shape.numel() for shape in shapes], dim=1)
    return [t.unflatten(1, shape) if len(shape) != 1 else t for t, shape in zip(columns, shapes)]


def part_of(graph: Graph, keep: Tensor, first: int, num_src: int) -> Graph:
    """The subgraph of the edges that ``keep``, a bool per CSR index, marks. Source ids count from ``first``; it has no
    edge ids.
    """
    indptr, indices, _ = graph.csr
    before = torch.zeros(indices.numel() + 1, dtype=indptr.dtype, device=indptr.device)
    torch.cumsum(keep, 0, out=before[1:])
    csr = Compressed(before[indptr.to(torch.int64)], indices[keep] - first, None)
    return Graph(csr, None, num_src, graph.num_dst)
