"""Message passing by a function of the rows at an edge's ends, without an edge tensor."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any, Union

import torch
from torch import Tensor
from torch.nn.utils import stateless

from ..autocast import rounds_to
from ..checks import PLAIN, check_choice, compiling
from ..choices.backends import NotFusedError, current_backend, transform_refusal
from ..graph.handle import Graph
from ..layers.calls import REFERENCE, ran_stock
from ..layers.explanation import Explanation
from ..programs import DESTINATION, EDGE, FIRST, NODE, SOURCE, Argument, ProgramCache, Refused, Sizes, Space
from ..programs.keys import function_key, module_key, value_key
from .checks import expect_graph

__all__ = ["message_passing"]

REDUCTIONS = ("sum", "mean", "max", "min")
PROGRAMS = ProgramCache()
Rows = Union[Tensor, Sequence[Tensor], None]


def message_passing(
    graph: Graph,
    message: Callable,
    *,
    src: Rows = None,
    dst: Rows = None,
    edge: Rows = None,
    reduce: str = "sum",
) -> Tensor:
    r"""Reduces messages that a function computes of the rows at the ends of each edge.

    .. math:: o_i = \bigoplus_{e = (j, i)} m(x_j, y_i, z_e) \quad\text{or}\quad
        o_i = \bigoplus_{e = (j, i)} \mathrm{softmax}_i(s(x_j, y_i, z_e))\, m(x_j, y_i, z_e)

    The function is traced once and runs over blocks of edges, forward and backward, so nothing of the size of the edges
    is allocated but the gradients of ``edge``. Where it cannot be traced, for instance because it depends on the order
    of edges, it runs over all edges at once. Tensors, modules and numbers that it closes over may change between calls.

    Args:
        graph (edgeless.Graph): messages flow from sources to destinations.
        message: called with the rows at the edges of every given argument: sources, then destinations, then edges. It
            returns the messages ``[E, ...]``, or a pair of scores ``[E]`` or ``[E, H]`` and messages ``[E, ...]``
            or ``[E, H, ...]``, which are multiplied by the softmax of the scores over a destination's edges.
        src: rows of the sources ``[Ns, ...]``, or several such tensors.
        dst: rows of the destinations ``[Nd, ...]``, or several.
        edge: rows of the edges ``[E, ...]`` in the graph's original order, or several.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
    Returns:
        Tensor ``[Nd, ...]``; destinations without in-edges get zeros.
    Raises:
        TypeError: the graph is no graph, the message no function, or rows no tensors.
        ValueError: rows have another number than the graph's, or an unknown reduction.
        NotFusedError: under ``edgeless.backend("fused")``, where the function cannot be traced.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> x, y, w = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 1)
        >>> functional.message_passing(graph, lambda x, y, w: torch.relu(x + y) * w, src=x, dst=y, edge=w).shape
        torch.Size([3, 4])
    """
    call = "message_passing"
    expect_graph(call, graph)
    if not callable(message):
        raise TypeError(f"{call}: message must be a function, got {type(message).__name__}")
    check_choice(call, "reduce", reduce, REDUCTIONS)
    groups = {"src": (src, graph.num_src), "dst": (dst, graph.num_dst), "edge": (edge, graph.num_edges)}
    rows = {name: _checked(call, name, value, count) for name, (value, count) in groups.items()}
    bound = _Bound(message, [len(rows[name]) for name in groups], reduce)
    tensors = [t for name in groups for t in rows[name]]
    try:
        program = _program(graph, bound, rows, tensors)
    except Refused as error:
        if current_backend() == "fused":
            raise NotFusedError(str(Explanation(call, False, (str(error),)))) from None
        ran_stock(f"edgeless.functional.{call}", call, [str(error)])
        ends = graph.edge_index()
        sizes = Sizes(graph.num_src, graph.num_dst, graph.num_edges)
        return bound.run(sizes, ends, ends[0], ends[0], *tensors, *bound.tensors)[0]
    return program(graph, [*tensors, *bound.tensors])[0]


def _checked(call: str, name: str, value: Rows, count: int) -> list[Tensor]:
    rows = [] if value is None else [value] if isinstance(value, Tensor) else list(value)
    for x in rows:
        if not isinstance(x, Tensor):
            raise TypeError(f"{call}: {name} must be a Tensor or several, got {type(x).__name__}")
        if x.dim() < 1 or x.size(0) != count:
            raise ValueError(f"{call}: {name} must have shape [{count}, ...], got {list(x.shape)}")
    return rows


def _program(graph: Graph, bound: _Bound, rows: dict, tensors: list[Tensor]):
    if current_backend() == "reference":
        raise Refused(REFERENCE)
    if compiling():
        raise Refused("torch.compile is tracing")
    if transform := transform_refusal():
        raise Refused(transform)
    if min(graph.num_edges, graph.num_src, graph.num_dst) < 1:
        raise Refused("the graph has no edges")
    everything = [*tensors, *bound.tensors]
    if any(type(t) not in PLAIN or t.layout is not torch.strided or t.is_complex() for t in everything):
        raise Refused("a tensor is not plain")
    if any(t.device != graph.device for t in everything):
        raise Refused("the tensors are on another device than the graph")
    one_set = graph.num_src == graph.num_dst
    kinds = {"src": NODE if one_set else SOURCE, "dst": NODE if one_set else DESTINATION, "edge": EDGE}
    spaces = [Space(kinds[name], 0) for name in rows for _ in rows[name]] + [Space()] * len(bound.tensors)
    grad = torch.is_grad_enabled()
    described = tuple(
        (t.dtype, space, tuple(t.shape[1:] if space.rows else t.shape), t.requires_grad and grad)
        for t, space in zip(everything, spaces)
    )
    key = (bound.key(), described, one_set, graph.device, rounds_to(graph.device.type), torch.get_default_dtype())
    wanted = [FIRST + i for i, t in enumerate(everything) if grad and t.requires_grad and t.is_floating_point()]

    def arguments() -> list[Argument]:
        ends = torch.zeros(2, 1, dtype=torch.int64, device=graph.device)
        given = [Argument(t, space, i in bound.written) for i, (t, space) in enumerate(zip(everything, spaces))]
        return [
            Argument(ends, Space(EDGE, 1, is_ends=True)),
            Argument(ends[0], Space(EDGE, 0)),
            Argument(ends[0]),
            *given,
        ]

    program = PROGRAMS.get(key, bound.run, arguments, one_set, 1, wanted)
    if graph.num_edges < program.least_edges:
        raise Refused("a norm over one edge is an error of the message's")
    return program


class _Place:
    """The variable from which a function reads a value: a cell of its closure, or a global name."""

    def __init__(self, holder: Any, name: str = ""):
        self.holder, self.name = holder, name

    def get(self) -> Any:
        try:
            return self.holder[self.name] if self.name else self.holder.cell_contents
        except (KeyError, ValueError):  # not there yet
            return None

    def set(self, value: Any) -> None:
        if self.name:
            self.holder[self.name] = value
        else:
            self.holder.cell_contents = value


def _places(function: Callable) -> list[_Place]:
    if not isinstance(function, types.FunctionType):
        return []
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    return [*map(_Place, function.__closure__ or ()), *(_Place(function.__globals__, name) for name in names)]


class _Bound:
    """A message function with the tensors and modules that it closes over as arguments."""

    written: frozenset[int] = frozenset()

    def __init__(self, message: Callable, counts: list[int], reduce: str):
        self.message, self.counts, self.reduce = message, counts, reduce
        self.places: list[_Place] = []  # the variables that hold tensors
        self.modules: list[torch.nn.Module] = [message] if isinstance(message, torch.nn.Module) else []
        for place in _places(message):
            content = place.get()
            if isinstance(content, Tensor):
                self.places.append(place)
            elif isinstance(content, torch.nn.Module):
                self.modules.append(content)
        self.states = [dict([*m.named_parameters(), *m.named_buffers()]) for m in self.modules]
        self.tensors = [p.get() for p in self.places] + [t for state in self.states for t in state.values()]

    def key(self) -> Any:
        function = self.message if isinstance(self.message, types.FunctionType) else None
        own = function_key(function) if function is not None else value_key(self.message)
        return (
            own,
            tuple(map(module_key, self.modules)),
            tuple(map(tuple, self.states)),
            tuple(self.counts),
            self.reduce,
        )

    def run(self, sizes: Sizes, ends: Tensor, ids: Tensor, seed: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        """The result for other tensors, in this order: sources, destinations, edges, closure variables, modules."""
        sources, destinations, edges = self.counts
        first, second, third = sources, sources + destinations, sources + destinations + edges
        rows = [t.index_select(0, ends[0]) for t in tensors[:first]]
        rows += [t.index_select(0, ends[1]) for t in tensors[first:second]]
        rows += tensors[second:third]
        own = iter(tensors[third:])
        before = [place.get() for place in self.places]
        try:
            for place in self.places:
                place.set(next(own))
            with contextlib.ExitStack() as stack:
                for module, state in zip(self.modules, self.states):
                    given = {name: next(own) for name in state}
                    stack.enter_context(stateless._reparametrize_module(module, given, tie_weights=True))
                out = self.message(*rows)
        finally:
            for place, content in zip(self.places, before):
                place.set(content)
        return (_reduced(out, ends[1], sizes.destinations, self.reduce),)


def _reduced(out: Any, index: Tensor, count: int, reduce: str) -> Tensor:
    if isinstance(out, (tuple, list)):
        score, value = out
        weight = _softmax(score, index, count)
        out = weight.view(*weight.shape, *[1] * (value.dim() - weight.dim())) * value
    shape = (count, *out.shape[1:])
    rows = index.view(-1, *[1] * (out.dim() - 1)).expand(out.shape)
    if reduce in ("max", "min"):
        return out.new_zeros(shape).scatter_reduce(0, rows, out, f"a{reduce}", include_self=False)
    total = out.new_zeros(shape).scatter_add(0, rows, out)
    if reduce == "sum":
        return total
    degree = out.new_zeros(count).scatter_add(0, index, out.new_ones(out.size(0))).clamp(min=1)
    return total / degree.view(-1, *[1] * (out.dim() - 1))


def _softmax(score: Tensor, index: Tensor, count: int) -> Tensor:
    rows = index.view(-1, *[1] * (score.dim() - 1)).expand(score.shape)
    best = score.new_zeros(count, *score.shape[1:])
    best = best.scatter_reduce(0, rows, score.detach(), "amax", include_self=False)
    weight = (score - best.index_select(0, index)).exp()
    total = torch.zeros_like(best).scatter_add(0, rows, weight)
    return weight / total.index_select(0, index)
