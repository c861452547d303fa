"""Records what one call of a layer computes on the edges of a graph, and computes it as programs.

Where no program may or can run, the recorded ops run by DGL's own functions over all edges.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from edgeless.autocast import autocast_dtype, autocasts, rounds_to
from edgeless.dropout import seed_tensor
from edgeless.graph_checks import PLAIN
from edgeless.programs import DESTINATION, EDGE, FIRST, NODE, PARAMETER, SOURCE, Argument, ProgramCache, Refused, Space
from edgeless.programs.layers import (
    check_graph,
    check_settled,
    is_finite_without_edges,
    write_back,
)
from edgeless.programs.spaces import Sizes

from . import expressions
from ._framework import stock_ops, zero_for_infinite
from .deferred import Deferred, is_view, may_record
from .expressions import FOLD, GATHER, Context, Value

PROGRAMS = ProgramCache()


class Recorder:
    """One call of a layer.

    Args:
        layer: the layer.
        graph: the DGLGraph or block of the call.
        handle: its :class:`edgeless.Graph`.
        choice: the value of ``EDGELESS_GENERATE``.

    Attributes:
        counts: the numbers of sources, destinations and edges.
        ran: the programs that ran.
        refused: why others did not.
        passing: whether the last refusal may not hold for the next call.
    """

    def __init__(self, layer, graph, handle, choice: str):
        self.layer, self.graph, self.handle, self.choice = layer, graph, handle, choice
        self.index, self.device = graph._graph, handle.device
        self.counts = {SOURCE: handle.num_src, DESTINATION: handle.num_dst, EDGE: handle.num_edges}
        self.sizes = Sizes(handle.num_src, handle.num_dst, handle.num_edges)
        self.ran: list[Any] = []
        self.refused: dict[str, bool] = {}  # whether for good
        self._leaves: dict[tuple[int, str], Value] = {}
        self._alive: dict[int, weakref.ref] = {}
        self._norms: list[tuple[Value, Tensor]] = []  # not yet computed, with the statistics that they write
        self._dropouts, self._seed, self._context, self._busy = 0, None, None, False
        self._degrees: Optional[Tensor] = None
        self._grad, self._autocast = torch.is_grad_enabled(), _autocast_state(self.device)

    # Recording -------------------------------------------------------------------------------------------------------

    def leaf(self, tensor: Tensor, space: str) -> Value:
        """The value of rows of a space, or of a tensor without rows."""
        if type(tensor) is Deferred:
            if tensor.recorder is self and tensor.known is None:
                return tensor.value
            tensor = tensor.recorder.tensor_of(tensor)
        key = id(tensor), space
        found = self._leaves.get(key)
        if found is None or found.tensor is not tensor:
            found = self._leaves[key] = Value.leaf(tensor, space)
        return found

    def defer(self, value: Value) -> Deferred:
        """The tensor of a value."""
        made = Deferred(self, value)
        self._alive[id(made)] = weakref.ref(made)
        return made

    def apply(self, op, *args: Value) -> Deferred:
        """The tensor of an op of graphs."""
        return self.defer(self.value(op, args, {}))

    def value(self, op, args: tuple, kwargs: dict) -> Value:
        """The value of an op.

        Raises:
            Refused: it cannot be recorded.
        """
        shape, dtype = expressions.results_of(op, args, kwargs, self.device)
        return Value(op, args, kwargs, shape, dtype, self._grad and not torch.is_grad_enabled())

    def in_degrees(self) -> Tensor:
        """The number of edges of every destination."""
        if self._degrees is None:
            self._degrees = self.graph.in_degrees()
        return self._degrees

    def rows_at_edges(self, tensor: Tensor, end: str) -> Deferred:
        """Rows of nodes at an end of each edge."""
        return self.apply(GATHER[end], self.leaf(tensor, end))

    def is_idle(self) -> bool:
        """Whether nothing is being recorded or computed now."""
        return not self._busy

    @contextlib.contextmanager
    def _at_work(self):
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def record(self, func, name: str, args: tuple, kwargs: dict) -> Any:
        """The deferred results of a call of torch's.

        Raises:
            Refused: it cannot be recorded.
        """
        given = [a for a in pytree.tree_leaves((args, kwargs)) if type(a) is Deferred and a.known is None]
        if not given or any(a.recorder is not self for a in given) or _autocast_state(self.device) != self._autocast:
            raise Refused("it is no value of this call")
        kinds = set().union(*(a.value.rows for a in given))
        if len(kinds) != 1 or not may_record(name, args, kwargs, EDGE in kinds):
            raise Refused(f"{name} is not recorded")
        with self._at_work():
            (kind,) = kinds
            args, kwargs = self._as_values(name, args, kind), self._as_values(name, kwargs, kind)
            if name == "batch_norm":
                args, kwargs = self._norm(args, kwargs)
            found = expressions.results_of(func, args, kwargs, self.device)
            stopped = self._grad and not torch.is_grad_enabled()
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

    def dropout(self, x: Deferred, p: float) -> Deferred:
        """Dropout with a mask that is the same wherever it is computed."""
        if x.value.shape[0] != expressions.PRIMES.edges:
            raise Refused("dropout is applied to something else than rows of edges")
        self._dropouts += 1
        with self._at_work():
            return self.apply(expressions.dropout(self._dropouts, float(p)), x.value)

    def _as_values(self, name: str, args: Any, kind: str) -> Any:
        """Arguments with values in place of tensors."""
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
            if any(isinstance(n, expressions.Count) for n in sizes[1:]):  # another number that is equal to it
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
        """Statistics are updated by the first computation of a norm."""
        done = {id(value) for value in order}
        for value, _ in self._norms:
            if id(value) in done:
                value.kwargs = {**value.kwargs, "running_mean": None, "running_var": None}
                value.inputs = [each for each in value.inputs if not each.written]
        self._norms = [(value, written) for value, written in self._norms if id(value) not in done]

    # Computing -------------------------------------------------------------------------------------------------------

    def requires_grad(self, value: Value) -> bool:
        """Whether the tensor of a value would require a gradient."""
        return self._grad and any(
            each.op is None and each.tensor.requires_grad for each in expressions.ordered([value])
        )

    def tensor_of(self, deferred: Deferred) -> Tensor:
        """The tensor that a deferred one stands for."""
        if deferred.known is None:
            self.compute([deferred])
        return deferred.known

    def before_write(self, tensor: Tensor) -> None:
        """Computes what was recorded, if it may read the tensor, which is going to be written."""
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
        """Computes everything that was recorded and that somebody still has, and writes statistics of norms."""
        pending = self._pending()
        norms = [self.defer(value) for value, _ in self._norms]
        if pending or norms:
            self.compute([*pending, *norms])
        self._leaves.clear()

    def compute_at_end(self, deferred: Sequence[Deferred]) -> None:
        """Computes what leaves the call, and writes statistics of norms, in one program if there can be one."""
        norms = [self.defer(value) for value, _ in self._norms]
        self.compute([*deferred, *norms])

    def compute(self, deferred: Sequence[Deferred]) -> None:
        """Computes tensors; with one of nodes, all of nodes that are waiting."""
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
        with self._at_work(), self._as_recorded():
            if not any(value.over_graph for value in order if value.op is not None):
                tensors = self._by_ops(values)
            else:
                try:
                    tensors = self._by_program(values, order)
                except Refused as error:
                    self.refused[str(error)] = getattr(error, "for_good", False)
                    tensors = self._by_ops(values)
        self._note_written(order)
        return tensors

    @contextlib.contextmanager
    def _as_recorded(self):
        """Gradients and autocast as they were when the call began."""
        with contextlib.ExitStack() as stack:
            if torch.is_grad_enabled() != self._grad:
                stack.enter_context(torch.set_grad_enabled(self._grad))
            if _autocast_state(self.device) != self._autocast:
                enabled, dtype = self._autocast
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype, enabled=enabled))
            yield

    # By a program ----------------------------------------------------------------------------------------------------

    def _by_program(self, values: list[Value], order: list[Value]) -> list[Tensor]:
        one_set = self.sizes.one_set
        tensors: list[Tensor] = []
        spaces: list[Space] = []
        written: list[bool] = []
        places: dict[int, int] = {}
        known: dict[Any, int] = {}
        for value in order:
            if value.op is not None:
                continue
            kind = NODE if one_set and value.space in (SOURCE, DESTINATION) else value.space
            space = Space() if kind == PARAMETER else Space(kind, value.dim)
            place = known.setdefault((id(value.tensor), space), len(tensors))
            if place == len(tensors):
                _check_plain(value.tensor, self.device)
                tensors.append(value.tensor)
                spaces.append(space)
                written.append(value.written)
            elif value.written != written[place]:
                raise Refused("a tensor is both written and read")
            places[id(value)] = place
        described = tuple(
            (t.dtype, space, tuple(n for d, n in enumerate(t.shape) if not (space.rows and d == space.dim)), w)
            + (self._grad and t.requires_grad,)
            for t, space, w in zip(tensors, spaces, written)
        )
        key = (
            *(expressions.structure_key(order, values, places), described, one_set, self.device, self._grad),
            *(rounds_to(self.device.type), torch.get_default_dtype()),
        )
        if key not in PROGRAMS:
            check_settled(self.layer)
        wanted = [FIRST + i for i, t in enumerate(tensors) if self._grad and t.requires_grad and t.is_floating_point()]

        def arguments() -> list[Argument]:
            ends = torch.zeros(2, 1, dtype=torch.int64, device=self.device)
            return [
                Argument(ends, Space(EDGE, 1, is_ends=True), name="edge_index"),
                Argument(ends[0], Space(EDGE, 0), name="edge_ids"),
                Argument(ends[0], Space(), name="seed"),
                *(Argument(t, space, w) for t, space, w in zip(tensors, spaces, written)),
            ]

        function = expressions.function_of(values, order, places)
        try:
            program = PROGRAMS.get(key, function, arguments, one_set, 1, wanted)
        except Refused as error:
            error.for_good = True
            raise
        if self.counts[EDGE] < program.least_edges:
            raise Refused("a norm over one edge is an error of the layer's")
        if program.landing is None and self.choice == "land":
            raise Refused("EDGELESS_GENERATE=land, and it lands on no op")
        check_graph(program, self.handle, self.choice)
        if not is_finite_without_edges(program, tensors, spaces, 1, self.handle):
            raise Refused("a node without edges has features that are not finite, which gradients of weights would be")
        results = program(self.handle, tensors, self.seed() if self._dropouts else None)
        write_back(program, tensors, results)
        self.ran.append(program)
        return results[: program.results]

    def seed(self) -> Tensor:
        """The seed of the call's dropouts."""
        if self._seed is None:
            self._seed = seed_tensor(None, self.device)
        return self._seed

    # By DGL's functions ----------------------------------------------------------------------------------------------

    def _by_ops(self, values: list[Value]) -> list[Tensor]:
        known: dict[int, Any] = {}

        def get(value: Value):
            if value.op is None:
                return value.tensor
            if id(value) not in known:
                known[id(value)] = self._by_op(value, get)
            return known[id(value)]

        return [get(value) for value in values]

    def _by_op(self, value: Value, get) -> Any:
        op = value.op
        if isinstance(op, expressions.GraphOp):
            found = self._by_graph_op(op, value, get)
            if found is not None:
                return found.detach() if value.stopped else found
        return expressions.compute_one(value, self.context(), get)

    def _by_graph_op(self, op: expressions.GraphOp, value: Value, get) -> Optional[Tensor]:
        if op.name == "builtin":
            return getattr(stock_ops, op.options[0])(self.graph, *map(get, value.args))
        if op == expressions.EDGE_SOFTMAX:
            return stock_ops.edge_softmax(self.graph, get(value.args[0]))
        if op.name != "fold":
            return None
        (reduce,), message = op.options, value.args[0]
        fused = None
        if message.op is not None and getattr(message.op, "name", "") == "builtin":
            fused = getattr(stock_ops, f"{message.op.options[0]}_{reduce}", None)
        if fused is not None and not message.stopped:
            result = fused(self.graph, *map(get, message.args))
        else:
            result = getattr(stock_ops, f"copy_e_{reduce}")(self.graph, get(message))
        return zero_for_infinite(result) if reduce in ("min", "max") else result

    def context(self) -> Context:
        """The graph as ops on all edges take it."""
        if self._context is None:
            ends = self.handle.edge_index()
            ids = torch.arange(self.counts[EDGE], device=self.device)
            self._context = Context(self.sizes, ends, ids, None)
        if self._dropouts:
            self._context.seed = self.seed()
        return self._context

    def fold(self, message: Value, reduce: str) -> Deferred:
        """Messages reduced for each destination."""
        return self.apply(FOLD[reduce], message)


def _has_rows_of(value: Value, kind: str) -> bool:
    return sum(bool(n) and n % expressions.PRIMES.of(kind) == 0 for n in value.shape) == 1


def _autocast_state(device: torch.device) -> tuple:
    return autocasts(device.type), autocast_dtype(device.type)


def _check_plain(tensor: Tensor, device: torch.device) -> None:
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex():
        raise Refused(f"an argument is a {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype}")
    if is_lazy(tensor):
        raise Refused("a parameter is not initialised")
    if tensor.device != device:
        raise Refused("the tensors are on several devices")
    if torch.is_grad_enabled() and tensor.is_inference():
        raise Refused("a tensor was made in inference mode, which keeps it from being saved for gradients")
