"""Halo rows: what a process reads of nodes that others own, and the gradients that go back.

Every rank packs the rows that others need, ordered by receiver, and a carrier delivers them. Packing is a sum over a
graph with one edge a row; its transpose adds up the gradients that come back, in a fixed order. An exchange is two
nodes of autograd, a start and a wait, and what is computed between them hides it: in the backward the gradients of halo
rows leave when the wait's turn comes, and are needed when the start's does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ..graph import Compressed, Graph
from ..graph_checks import FLOATS, normal_tensors
from ..ops import spmm as _spmm  # noqa: F401  registers the fake kernels of the op
from ..untraced import untraced
from .carriers import AllToAll
from .process import Ranks


class Halo:
    """Who sends which of its rows to whom.

    Args:
        num_own: n, rows of this rank.
        sent: rows ``[S]`` (int64) that this rank sends, ordered by receiver.
        num_sent, num_received: how many go to and come from every rank.

        keep_features: whether rows of features that need no gradient are kept; None: as the carrier does best.

    Attributes:
        carrier: what brings the rows, see :mod:`edgeless.distributed.carriers`.
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
        self._kept: dict = {}  # id of a tensor -> (weak reference, version, what was received for it)

    @property
    def pack(self) -> Graph:
        """From own rows to rows to send; its transpose sums what comes back."""
        if self._pack is None:
            with normal_tensors():
                indptr = torch.arange(self.sent.numel() + 1, device=self.sent.device)
                self._pack = Graph.from_csr(indptr, self.sent, self.num_own, validate=False)
                _ = self._pack.csc
        return self._pack

    def to(self, device) -> Halo:
        """The same on ``device``, with nothing kept, carried by all-to-all."""
        sent = self.sent.to(device)
        return Halo(self.ranks, self.num_own, sent, self.num_sent, self.num_received, self.keep_features)

    # Exchanges -------------------------------------------------------------------------------------------------------

    @untraced  # what is under way is no tensor: a program of torch.compile breaks here and at the wait
    def start(self, rows: Tensor, join: bool) -> Flight:
        """Begins to receive halo rows for own ``rows`` ``[n, ...]``.

        Args:
            join: whether :meth:`Flight.wait` is to give own and halo rows together, ``[n + h, ...]``.
        Raises:
            ValueError: rows has another number of rows.
            RuntimeError: on every rank, where they are not about to do the same.
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
        """Whether the halo's rows are kept for these, alone or with own rows."""
        return any(self._find(rows, join) is not None for join in (False, True))

    def _find(self, rows: Tensor, join: bool) -> Optional[Tensor]:
        """What was received for these very rows before, which need no gradient: features that stay the same."""
        found = None if rows.requires_grad or rows.is_inference() else self._kept.get((id(rows), join))
        if found is None:
            return None
        reference, version, received = found
        return received if reference() is rows and rows._version == version else None

    def remember(self, rows: Tensor, join: bool, received: Tensor) -> None:
        """Keeps what was received for as long as ``rows`` lives."""
        key, kept = (id(rows), join), self._kept

        def forget(reference, key=key, kept=kept):
            if key in kept and kept[key][0] is reference:
                del kept[key]

        kept[key] = (weakref.ref(rows, forget), rows._version, received)

    def forget(self) -> None:
        """Drops all rows that are kept of features that stay, and the carrier's memory. All ranks call it, at the same
        place of their program.
        """
        self._kept.clear()
        self.carrier.forget()

    def packed(self, rows: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """The rows to send, ``[S, ...]``; written to ``out``, contiguous, where it is given."""
        if rows.dtype not in FLOATS:
            return torch.index_select(rows, 0, self.sent, out=out)
        flat, csr = _flat(rows), self.pack.csr_arrays(False)
        if out is not None:
            torch.ops.edgeless.spmm_into(_flat(out), flat, csr, [1])
            return out
        out = torch.ops.edgeless.spmm(flat, None, None, None, csr, [], rows.dtype, [1])
        return out.view(out.size(0), *rows.shape[1:])

    def summed(self, returned: Tensor) -> Tensor:
        """What came back for the rows that were sent, summed for every own row, ``[n, ...]``."""
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
    """One exchange under way, and its return in the backward."""

    def __init__(self, halo: Halo, join: bool):
        self.halo, self.join = halo, join
        self.here: Optional[Tensor] = None  # where nothing has to be waited for
        self.coming: Optional[Tensor] = None
        self.keep: Optional[Tensor] = None  # own rows whose exchange is worth remembering
        self._way = None  # what the carrier has begun

    @untraced
    def wait(self) -> Tensor:
        """The halo's rows ``[h, ...]``, or own and halo rows ``[n + h, ...]``. Some are kept: do not write to them."""
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
        """What ``Flight.wait`` gives, of every tensor."""
        arrived = tuple(flight.wait() for flight in self._flights)
        if self._joined is None:
            return arrived
        return tuple(_columns(arrived[0], self._joined))


def stacked(own: Sequence[Tensor], halo: Sequence[Tensor]) -> list[Tensor]:
    """Own over halo rows, ``[n, ...]`` and ``[h, ...]`` to ``[n + h, ...]``, of several tensors.

    Those of one shape, as keys and values are, become parts of one tensor, side by side.
    """
    if len({(t.dtype, t.shape[1:]) for t in own}) > 1:
        return [torch.cat(pair) for pair in zip(own, halo)]
    return _columns(_Stack.apply(len(own), *own, *halo), [t.shape[1:] for t in own])


class _Stack(torch.autograd.Function):
    """In one pass, where ``torch.cat`` of rows and then of columns takes two and as much memory again."""

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
    """Whether these are features that a training does not change: every epoch needs the same halo rows of them."""
    return torch.is_grad_enabled() and not rows.requires_grad and not rows.is_inference()


def _flat(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 2 else rows.reshape(rows.size(0), rows.shape[1:].numel())


def _columns(rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The parts ``[N, *shape]`` of rows that stand side by side, as :func:`_flat` has them."""
    columns = rows.split([shape.numel() for shape in shapes], dim=1)
    return [t.unflatten(1, shape) if len(shape) != 1 else t for t, shape in zip(columns, shapes)]


def part_of(graph: Graph, keep: Tensor, first: int, num_src: int) -> Graph:
    """The edges of ``graph`` that ``keep`` marks by their positions in its CSR, from sources ``first`` on; no ids."""
    indptr, indices, _ = graph.csr
    before = torch.zeros(indices.numel() + 1, dtype=indptr.dtype, device=indptr.device)
    torch.cumsum(keep, 0, out=before[1:])
    csr = Compressed(before[indptr.to(torch.int64)], indices[keep] - first, None)
    return Graph(csr, None, num_src, graph.num_dst)
