"""Records the computations of one call of a layer on the edges of a graph, and runs them as programs.

Where a program may not or cannot run, DGL's own functions compute the recorded ops over all edges.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from edgeless.autocast import autocast_dtype, autocasts
from edgeless.functional.dropout import seed_tensor
from edgeless.programs import DESTINATION, EDGE, PARAMETER, SOURCE, Refused
from edgeless.programs.front.spaces import Sizes

from . import computing, expressions
from .computing import by_ops, by_program
from .deferred import Deferred, at_work, deferred_in, is_view, may_record
from .expressions import FOLD, GATHER, Context, Value


class Recorder:
    """One call of a layer.

    Args:
        layer: the layer.
        graph: the DGLGraph or block of the call.
        handle: the graph as an :class:`edgeless.Graph`.
        choice: the value of ``EDGELESS_GENERATE``.

    Attributes:
        counts: the numbers of sources, destinations and edges.
        ran: the programs that ran.
        refused: the reasons why other programs did not run.
        ended: whether the call has ended, after which nothing is recorded.
    """

    def __init__(self, layer, graph, handle, choice: str):
        self.layer, self.graph, self.handle, self.choice = layer, graph, handle, choice
        self.index, self.device = graph._graph, handle.device
        self.counts = {SOURCE: handle.num_src, DESTINATION: handle.num_dst, EDGE: handle.num_edges}
        self.sizes = Sizes(handle.num_src, handle.num_dst, handle.num_edges)
        self.ran: list[Any] = []
        self.ended = False
        self.refused: dict[str, bool] = {}  # reason -> whether it holds for every call of the form
        self._leaves: dict[tuple[int, str], Value] = {}
        self._alive: dict[int, weakref.ref] = {}
        # Norms that are not computed yet, with the statistics that they write.
        self._norms: list[tuple[Value, Tensor]] = []
        self.dropouts, self._seed, self._context = 0, None, None
        self._degrees: Optional[Tensor] = None
        self.grad, self._autocast = torch.is_grad_enabled(), _autocast_state(self.device)

    # Recording -------------------------------------------------------------------------------------------------------

    def leaf(self, tensor: Tensor, space: str) -> Value:
        """The value of a tensor with rows of a space, or without rows.

        Raises:
            Refused: the tensor has another number of rows.
        """
        if not isinstance(tensor, Tensor):
            raise Refused(f"a feature is a {type(tensor).__name__}")
        if type(tensor) is Deferred:
            if tensor.recorder is self and tensor.known is None:
                if tensor.value.shape[:1] != (expressions.PRIMES.of(space),):
                    raise Refused(f"a feature has no row for each {space}")
                return tensor.value
            tensor = tensor.recorder.tensor_of(tensor)
        key = id(tensor), space
        found = self._leaves.get(key)
        if found is None or found.tensor is not tensor:
            if space != PARAMETER and (tensor.dim() == 0 or tensor.size(0) != self.counts[space]):
                raise Refused(f"a feature has no row for each {space}")
            found = self._leaves[key] = Value.leaf(tensor, space)
        return found

    def defer(self, value: Value) -> Deferred:
        """The deferred tensor of a value."""
        made = Deferred(self, value)
        self._alive[id(made)] = weakref.ref(made)
        return made

    def apply(self, op, *args: Value) -> Deferred:
        """The deferred tensor of a :class:`GraphOp` on values."""
        return self.defer(self.value(op, args, {}))

    def value(self, op, args: tuple, kwargs: dict) -> Value:
        """The value of an op on arguments.

        Raises:
            Refused: the op cannot be recorded.
        """
        shape, dtype = expressions.results_of(op, args, kwargs, self.device)
        return Value(op, args, kwargs, shape, dtype, self.grad and not torch.is_grad_enabled())

    def in_degrees(self) -> Tensor:
        """The number of edges of every destination."""
        if self._degrees is None:
            self._degrees = self.graph.in_degrees()
        return self._degrees

    def rows_at_edges(self, tensor: Tensor, end: str) -> Deferred:
        """The rows of nodes gathered to one end of each edge."""
        return self.apply(GATHER[end], self.leaf(tensor, end))

    def record(self, func, name: str, args: tuple, kwargs: dict) -> Any:
        """Records a call of a function of torch and returns its deferred results.

        Raises:
            Refused: the call cannot be recorded.
        """
        given = [a for a in deferred_in((args, kwargs)) if a.known is None]
        if not given or any(a.recorder is not self for a in given) or _autocast_state(self.device) != self._autocast:
            raise Refused("it is no value of this call")
        kinds = set().union(*(a.value.rows for a in given))
        if len(kinds) != 1 or not may_record(name, args, kwargs, EDGE in kinds):
            raise Refused(f"{name} is not recorded")
        with at_work():
            (kind,) = kinds
            args, kwargs = self._as_values(name, args, kind), self._as_values(name, kwargs, kind)
            if name == "linear" and self._is_apart(args[0]):
                raise Refused("wide products of edges are computed by torch")
            if name == "batch_norm":
                args, kwargs = self._norm(args, kwargs)
            found = expressions.results_of(func, args, kwargs, self.device)
            stopped = self.grad and not torch.is_grad_enabled()
            if isinstance(found, tuple):
                results = [Value(func, args, kwargs, *found, stopped)]
            else:
                whole = Value(func, args, kwargs, (), None, stopped)
                results = [Value(operator.getitem, (whole, i), {}, *each) for i, each in enumerate(found)]
            if any(value.rows != kinds or not _has_rows_of(value, kind) for value in results):
                raise Refused(f"{name} has no row for each {kind}")
        if is_view(name):
            for value in {id(a.value): a.value for a in given}.values():
                value.viewed = True
            for value in results:
                value.viewed = True
        if name == "batch_norm":
            self._note_norm(results[0])
        made = [self.defer(value) for value in results]
        return made[0] if isinstance(found, tuple) else tuple(made)

    def _is_apart(self, rows: Any) -> bool:
        """Returns whether torch computes a linear map of edge rows as an op of its own, since several walks would
        compute it again.
        """
        wide = isinstance(rows, Value) and not rows.over_graph and rows.shape[-1] >= computing.WIDE
        return wide and self.choice == "auto" and self.device.type == "cpu" and self.layer in computing.apart

    def dropout(self, x: Deferred, p: float) -> Deferred:
        """Records dropout; every program draws the same mask for it."""
        if x.value.shape[0] != expressions.PRIMES.edges:
            raise Refused("dropout is applied to something else than rows of edges")
        self.dropouts += 1
        with at_work():
            return self.apply(expressions.dropout(self.dropouts, float(p)), x.value)

    def _as_values(self, name: str, args: Any, kind: str) -> Any:
        """Replaces tensors in arguments by values."""
        edges = self.counts[kind]

        def value(arg):
            if type(arg) is Deferred and arg.known is None:
                return arg.value
            if isinstance(arg, Tensor):
                tensor = arg.recorder.tensor_of(arg) if type(arg) is Deferred else arg
                by_row = tensor.dim() > 0 and tensor.size(0) == edges and not isinstance(tensor, torch.nn.Parameter)
                return self.leaf(tensor, kind if by_row else PARAMETER)
            if type(arg) is int and arg == edges and name in ("view", "reshape", "expand"):
                return expressions.Count(arg, kind)
            return arg

        args = expressions.mapped(args, value)
        if name in ("view", "reshape", "expand") and isinstance(args, tuple):
            sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
            if any(isinstance(n, expressions.Count) for n in sizes[1:]):  # another number that equals a prime
                sizes = [n if i == 0 else (int(n) if n == edges else n) for i, n in enumerate(sizes)]
                args = (args[0], *sizes)
        return args

    # Norms, whose statistics are written once ------------------------------------------------------------------------

    def _norm(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args)), **kwargs}
        if given.get("training") and given.get("running_mean") is not None:
            mean, var = given["running_mean"], given["running_var"]
            if any(written is mean.tensor for _, written in self._norms):
                self.compute_all()
            for name, value in (("running_mean", mean), ("running_var", var)):
                given[name] = Value.leaf(value.tensor, PARAMETER)
                given[name].written = True
        return (given.pop("input"),), given

    def _note_norm(self, value: Value) -> None:
        mean = value.kwargs.get("running_mean")
        if mean is not None and mean.written:
            self._norms.append((value, mean.tensor))

    def _note_written(self, order: Sequence[Value]) -> None:
        """Lets the first computation of a norm update its statistics."""
        done = {id(value) for value in order}
        for value, _ in self._norms:
            if id(value) in done:
                value.kwargs = {**value.kwargs, "running_mean": None, "running_var": None}
                value.inputs = [each for each in value.inputs if not each.written]
        self._norms = [(value, written) for value, written in self._norms if id(value) not in done]

    # Computing -------------------------------------------------------------------------------------------------------

    def requires_grad(self, value: Value) -> bool:
        """Returns whether the tensor of a value would require a gradient."""
        return self.grad and any(each.op is None and each.tensor.requires_grad for each in expressions.ordered([value]))

    def tensor_of(self, deferred: Deferred) -> Tensor:
        """Computes a deferred tensor."""
        if deferred.known is None:
            self.compute([deferred])
        return deferred.known

    def before_write(self, tensor: Tensor) -> None:
        """Computes the recorded values if they may read a tensor, before it is written."""
        if type(tensor) is Deferred:
            if tensor.known is None:
                return
            tensor = tensor.known
        if tensor.layout is not torch.strided:
            return self.compute_all()
        memory = tensor.untyped_storage()._cdata
        leaves = {
            id(each): each
            for made in self._pending()
            for each in expressions.ordered([made.value])
            if each.op is None and each.tensor.layout is torch.strided
        }
        if any(each.tensor.untyped_storage()._cdata == memory for each in leaves.values()):
            self.compute_all()

    def _pending(self) -> list[Deferred]:
        self._alive = {place: made for place, made in self._alive.items() if made() is not None}
        found = [made() for made in self._alive.values()]
        return [made for made in found if made is not None and made.known is None]

    def compute_all(self) -> None:
        """Computes all recorded values that are still referenced, and writes statistics of norms."""
        pending = self._pending()
        norms = [self.defer(value) for value, _ in self._norms]
        if pending or norms:
            self.compute([*pending, *norms])
        self._leaves.clear()

    def compute_at_end(self, deferred: Sequence[Deferred]) -> None:
        """Computes the tensors that leave the call and writes statistics of norms, in one program if possible."""
        norms = [self.defer(value) for value, _ in self._norms]
        self.compute([*deferred, *norms])

    def compute(self, deferred: Sequence[Deferred]) -> None:
        """Computes deferred tensors. If one has rows of nodes, all pending tensors with rows of nodes are computed with
        it.
        """
        for made in deferred:
            if made.recorder is not self:  # it belongs to a layer that calls this one, perhaps with another graph
                made.recorder.tensor_of(made)
            elif made.known is None and made.value.op is None:  # it is the caller's tensor
                made.known = made.value.tensor
        wanted = {id(made): made for made in deferred if made.known is None}
        if any(EDGE not in made.value.rows for made in wanted.values()):
            wanted |= {id(made): made for made in self._pending() if EDGE not in made.value.rows}
        by_value: dict[int, list[Deferred]] = {}
        for made in wanted.values():
            by_value.setdefault(id(made.value), []).append(made)
        groups = list(by_value.values())
        if not groups:
            return
        values = [group[0].value for group in groups]
        for value, tensor, group in zip(values, self._computed(values), groups):
            if tuple(tensor.shape) != tuple(group[0].shape):
                raise Refused("a shape was recorded wrongly")
            for made in group:
                made.known = tensor
            value.settle(tensor)

    def _computed(self, values: list[Value]) -> list[Tensor]:
        order = expressions.ordered(values)
        with at_work(), self._as_recorded():
            if not any(value.over_graph for value in order if value.op is not None):
                tensors = by_ops(self, values)
            else:
                try:
                    tensors = by_program(self, values, order)
                except Refused as error:
                    self.refused[str(error)] = getattr(error, "for_good", False)
                    tensors = by_ops(self, values)
        self._note_written(order)
        for value in order:
            for each in value.inputs:
                each.passed = each.passed or each.op is not None
        return tensors

    @contextlib.contextmanager
    def _as_recorded(self):
        """Restores the modes of gradients and autocast as they were when the call began."""
        with contextlib.ExitStack() as stack:
            if torch.is_grad_enabled() != self.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if _autocast_state(self.device) != self._autocast:
                enabled, dtype = self._autocast
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype, enabled=enabled))
            yield

    def seed(self) -> Tensor:
        """The seed of the call's dropouts."""
        if self._seed is None:
            self._seed = seed_tensor(None, self.device)
        return self._seed

    def context(self) -> Context:
        """The graph for ops over all edges."""
        if self._context is None:
            ends = self.handle.edge_index()
            ids = torch.arange(self.counts[EDGE], device=self.device)
            self._context = Context(self.sizes, ends, ids, None)
        if self.dropouts:
            self._context.seed = self.seed()
        return self._context

    def fold(self, message: Value, reduce: str) -> Deferred:
        """Records the reduction of messages for each destination."""
        return self.apply(FOLD[reduce], message)


def _has_rows_of(value: Value, kind: str) -> bool:
    return sum(bool(n) and n % expressions.PRIMES.of(kind) == 0 for n in value.shape) == 1


def _autocast_state(device: torch.device) -> tuple:
    return autocasts(device.type), autocast_dtype(device.type)
