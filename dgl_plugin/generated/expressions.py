"""Expressions of edge values: a layer's computations on a graph, recorded to run as one program.

A :class:`Value` is a node of an expression. A leaf is a tensor with rows of sources, destinations or edges, or a tensor
without rows; the others are ops on values. :func:`evaluate` computes values for any graph: programs are traced from it,
and it runs where there is no program.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from edgeless.autocast import rounds_to
from edgeless.programs import DESTINATION, EDGE, PARAMETER, SOURCE, Refused, Sizes
from edgeless.programs.front.spaces import traced_sizes

from .._autocast import as_dgl_reads

PRIMES = traced_sizes(one_set=False)  # sizes that mark the dimensions of rows
_COUNTS = {SOURCE: PRIMES.sources, DESTINATION: PRIMES.destinations, EDGE: PRIMES.edges}
_MOST_KNOWN = 1 << 14
_LOG, _DROP = logging.getLogger("torch._subclasses.fake_tensor"), logging.Filter("nothing")


class Count(int):
    """The number of rows of a space, or a multiple of it, as the layer's code sees it.

    Attributes:
        kind: the space.
        times: the multiple.
    """

    kind: str
    times: int

    def __new__(cls, value: int, kind: str, times: int = 1):
        count = super().__new__(cls, value)
        count.kind, count.times = kind, times
        return count

    def __reduce_ex__(self, protocol):
        return int, (int(self),)


class GraphOp:
    """An op that goes between nodes and edges, or draws random numbers by edge. Equal ops have equal keys.

    Args:
        name: the kind of op.
        compute: called with the :class:`Context` and the values.
        options: the options that distinguish ops of one kind.
    """

    def __init__(self, name: str, compute: Callable, *options: Any):
        self.key, self.compute, self.name, self.options = (name, *options), compute, name, options

    def __eq__(self, other) -> bool:
        return isinstance(other, GraphOp) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Context:
    """The graph that values are computed for: its ends ``[2, E]``, ids ``[E]``, a seed and its sizes."""

    def __init__(self, sizes: Sizes, ends: Tensor, ids: Tensor, seed: Optional[Tensor]):
        self.sizes, self.ends, self.ids, self.seed = sizes, ends, ids, seed


class Value:
    """A node of an expression.

    Attributes:
        op: a function of torch, a :class:`GraphOp`, or None for a leaf.
        args, kwargs: the arguments of the op, which may contain values.
        space: the space of a leaf's tensor.
        tensor: the tensor of a leaf.
        shape: the shape, with the sizes of :data:`PRIMES` for rows.
        dtype: the dtype of its elements.
        stopped: whether gradients end here.
        over_graph: whether it depends on rows of nodes.
        viewed: whether another value may be a view of it.
        written: whether the expression writes into the leaf's tensor.
        passed: whether it was an intermediate of a value that was computed, whose gradients therefore do not pass
            through this value's own tensor.
    """

    __slots__ = (
        *("op", "args", "kwargs", "space", "dim", "tensor", "shape", "dtype"),
        *("stopped", "over_graph", "inputs", "viewed", "written", "passed"),
    )

    def __init__(self, op, args=(), kwargs=None, shape=(), dtype=None, stopped=False):
        self.op, self.args, self.kwargs = op, args, kwargs or {}
        self.shape, self.dtype, self.stopped = shape, dtype, stopped
        self.space, self.dim, self.tensor, self.viewed, self.written = PARAMETER, 0, None, False, False
        self.passed = False
        self.inputs = list(_values_in((args, self.kwargs)))
        self.over_graph = isinstance(op, GraphOp) or any(value.over_graph for value in self.inputs)

    @classmethod
    def leaf(cls, tensor: Tensor, space: str) -> Value:
        """The value of a tensor whose first dimension is the rows of a space."""
        shape = tuple(tensor.shape) if space == PARAMETER else (_COUNTS[space], *tensor.shape[1:])
        value = cls(None, shape=shape, dtype=tensor.dtype)
        value.space, value.tensor, value.over_graph = space, tensor, space in (SOURCE, DESTINATION)
        return value

    def settle(self, tensor: Tensor) -> None:
        """Makes the value a leaf after its tensor was computed, if its first dimension is the rows of one space."""
        dims = [(d, kind) for d, n in enumerate(self.shape) for kind, prime in _COUNTS.items() if n == prime]
        if len(dims) == 1 and len(self.rows) == 1:
            ((self.dim, self.space),) = dims
            self.op, self.args, self.kwargs, self.inputs, self.tensor = None, (), {}, [], tensor
            self.stopped = False

    def sizes(self, counts: dict[str, int]) -> tuple[int, ...]:
        """The value's shape if the spaces have these numbers of rows."""
        return tuple(_scaled(extent, counts) for extent in self.shape)

    @property
    def rows(self) -> frozenset[str]:
        """The spaces whose rows are among the value's dimensions."""
        return _rows_of(self.shape)


@functools.lru_cache(maxsize=1 << 12)
def _rows_of(shape: tuple[int, ...]) -> frozenset[str]:
    return frozenset(kind for n in shape for kind, prime in _COUNTS.items() if n and n % prime == 0)


def _scaled(extent: int, counts: dict[str, int]) -> int:
    for kind, prime in _COUNTS.items():
        if extent and extent % prime == 0:
            return Count(extent // prime * counts[kind], kind, extent // prime)
    return extent


def _values_in(args: Any) -> Iterable[Value]:
    if isinstance(args, Value):
        yield args
    elif isinstance(args, (tuple, list)):
        for arg in args:
            yield from _values_in(arg)
    elif isinstance(args, dict):
        yield from _values_in(tuple(args.values()))


def mapped(args: Any, leaf: Callable[[Any], Any]) -> Any:
    """Applies ``leaf`` to everything in nested arguments but tuples, lists, dictionaries and slices."""
    if isinstance(args, (tuple, list)) and not isinstance(args, torch.Size):
        return type(args)(mapped(a, leaf) for a in args) if type(args) in (tuple, list) else leaf(args)
    if isinstance(args, torch.Size):
        return tuple(mapped(a, leaf) for a in args)
    if type(args) is dict:
        return {name: mapped(a, leaf) for name, a in args.items()}
    if isinstance(args, slice):
        return slice(*(mapped(a, leaf) for a in (args.start, args.stop, args.step)))
    return leaf(args)


# Shapes --------------------------------------------------------------------------------------------------------------

_known: dict[Hashable, Any] = {}
_NUMBERS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def constant_key(value: Any) -> Hashable:
    """A key of an argument that is no value; an op treats arguments with equal keys alike.

    Raises:
        Refused: the argument has a type that ops do not take.
    """
    if isinstance(value, Count):
        return Count, value.kind, value.times
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, _NUMBERS):
        return type(value), value
    raise Refused(f"an argument of an op on edges is a {type(value).__name__}")


def _signature(args: Any, of_value: Callable[[Value], Hashable]) -> Hashable:
    if isinstance(args, Value):
        return of_value(args)
    if isinstance(args, (tuple, list)):
        return type(args), tuple(_signature(a, of_value) for a in args)
    if isinstance(args, dict):
        return dict, tuple((name, _signature(a, of_value)) for name, a in args.items())
    if isinstance(args, slice):
        return slice, tuple(_signature(a, of_value) for a in (args.start, args.stop, args.step))
    return constant_key(args)


def results_of(op: Any, args: tuple, kwargs: dict, device: torch.device) -> Any:
    """The shapes and dtypes of an op's results, ``(shape, dtype)`` or several such pairs.

    Raises:
        Refused: the op cannot be computed without its operands' contents.
    """
    signature = _signature((args, kwargs), lambda value: (value.shape, value.dtype))
    key = (op, signature, device, rounds_to(device.type), torch.get_default_dtype())
    found = _known.get(key)
    if found is None:
        found = _computed(op, args, kwargs, device)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    if isinstance(found, str):
        raise Refused(found)
    return found


def _computed(op: Any, args: tuple, kwargs: dict, device: torch.device) -> Any:
    def stand_in(value):
        if isinstance(value, Value):
            return torch.empty(value.shape, dtype=value.dtype, device=device)
        return value.times * _COUNTS[value.kind] if isinstance(value, Count) else value

    _LOG.addFilter(_DROP)  # torch logs errors that are caught here
    try:
        with FakeTensorMode(), torch.no_grad():
            given, named = mapped(args, stand_in), mapped(kwargs, stand_in)
            if isinstance(op, GraphOp):
                ids = torch.empty(PRIMES.edges, dtype=torch.int64, device=device)
                ends = torch.empty(2, PRIMES.edges, dtype=torch.int64, device=device)
                seed = torch.empty(1, dtype=torch.int64, device=device)
                result = op.compute(Context(PRIMES, ends, ids, seed), *given)
            else:
                result = op(*given, **named)
            if isinstance(result, Tensor):
                return tuple(result.shape), result.dtype
            if isinstance(result, (tuple, list)) and all(isinstance(r, Tensor) for r in result):
                return [(tuple(r.shape), r.dtype) for r in result]
            return "an op on edges returns something else than tensors"
    except Exception as error:  # the op needs contents, or fails for the real sizes too
        return f"{_name(op)} over edges cannot be recorded, {type(error).__name__}: {str(error).strip()[:120]}"
    finally:
        _LOG.removeFilter(_DROP)


def _name(op: Any) -> str:
    return op.name if isinstance(op, GraphOp) else getattr(op, "__name__", str(op))


# Computing -----------------------------------------------------------------------------------------------------------


def ordered(outputs: Sequence[Value]) -> list[Value]:
    """The outputs and the values that they depend on, each after its inputs."""
    order: list[Value] = []
    seen: set[int] = set()
    stack = [(value, False) for value in reversed(outputs)]
    while stack:
        value, done = stack.pop()
        if done:
            order.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            stack.append((value, True))
            stack.extend((each, False) for each in reversed(value.inputs) if id(each) not in seen)
    return order


def structure_key(order: Sequence[Value], outputs: Sequence[Value], places: dict[int, int]) -> Hashable:
    """A key of an expression without its tensors; ``places`` has the argument index of each leaf by its id."""
    index = {id(value): i for i, value in enumerate(order)}

    def of(value: Value) -> Hashable:
        return "value", index[id(value)]

    nodes = tuple(
        ("leaf", places[id(value)])
        if value.op is None
        else (value.op, value.stopped, _signature((value.args, value.kwargs), of))
        for value in order
    )
    return nodes, tuple(index[id(value)] for value in outputs)


def compute_one(value: Value, context: Context, known: Callable[[Value], Any]) -> Any:
    """Computes the result of one op; ``known`` gives the results of its inputs."""

    def real(arg):
        if isinstance(arg, Value):
            return known(arg)
        return arg.times * context.sizes.of(arg.kind) if isinstance(arg, Count) else arg

    args, kwargs = mapped(value.args, real), mapped(value.kwargs, real)
    result = value.op.compute(context, *args) if isinstance(value.op, GraphOp) else value.op(*args, **kwargs)
    if value.stopped:
        if isinstance(result, Tensor):
            return result.detach()
        return type(result)(r.detach() if isinstance(r, Tensor) else r for r in result)
    return result


def function_of(outputs: Sequence[Value], order: Sequence[Value], places: dict[int, int]) -> Callable:
    """The expression as a function ``(sizes, ends, ids, seed, *tensors)``, as programs are traced from."""
    slots = {id(value): places[id(value)] for value in order if value.op is None}

    def run(sizes: Sizes, ends: Tensor, ids: Tensor, seed: Tensor, *tensors: Tensor) -> tuple:
        context, results = Context(sizes, ends, ids, seed), {}
        for value in order:
            if value.op is None:
                results[id(value)] = tensors[slots[id(value)]]
            else:
                results[id(value)] = compute_one(value, context, lambda arg: results[id(arg)])
        return tuple(results[id(value)] for value in outputs)

    return run


# Ops of graphs -------------------------------------------------------------------------------------------------------


def _gather(end: int) -> GraphOp:
    return GraphOp("gather", lambda context, x: x.index_select(0, context.ends[end]), end)


GATHER = {SOURCE: _gather(0), DESTINATION: _gather(1)}


def _fold(reduce: str) -> GraphOp:
    return GraphOp("fold", lambda context, x: reduced(context, as_dgl_reads(x), reduce), reduce)


def reduced(context: Context, x: Tensor, reduce: str) -> Tensor:
    """Reduces messages ``[E, ...]`` for each destination; destinations without edges get 0."""
    index, count = context.ends[1], context.sizes.destinations
    rows = index.view(-1, *[1] * (x.dim() - 1)).expand(x.shape)
    if reduce in ("max", "min"):
        return x.new_zeros(count, *x.shape[1:]).scatter_reduce(0, rows, x, f"a{reduce}", include_self=False)
    total = x.new_zeros(count, *x.shape[1:]).scatter_add(0, rows, x)
    if reduce == "sum":
        return total
    degree = x.new_zeros(count).scatter_add(0, index, x.new_ones(x.size(0))).clamp(min=1)
    return total / degree.view(-1, *[1] * (x.dim() - 1))


FOLD = {reduce: _fold(reduce) for reduce in ("sum", "mean", "max", "min")}


def _softmax(context: Context, x: Tensor) -> Tensor:
    index, x = context.ends[1], as_dgl_reads(x)
    weight = (x - reduced(context, x.detach(), "max").index_select(0, index)).exp()
    return weight / reduced(context, weight, "sum").index_select(0, index)


EDGE_SOFTMAX = GraphOp("edge_softmax", _softmax)


def dropout(number: int, p: float) -> GraphOp:
    """The dropout with this number in a call; every program draws the same mask for it."""
    from edgeless.programs.front.ops import dropout_scale

    def compute(context: Context, x: Tensor) -> Tensor:
        return x * dropout_scale(x.detach(), context.seed, context.ids, number, p)

    return GraphOp("dropout", compute, number, p)


_BINARY = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}


def builtin(name: str) -> GraphOp:
    """A built-in message function of DGL, such as ``"u_add_v"``, as an op on rows of nodes or edges."""
    return _BUILTINS.setdefault(name, GraphOp("builtin", lambda context, *rows: _builtin(context, name, *rows), name))


_BUILTINS: dict[str, GraphOp] = {}


def _builtin(context: Context, name: str, *rows: Tensor) -> Tensor:
    parts = name.split("_")
    letters = parts[1:] if parts[0] == "copy" else (parts[0], parts[2])
    ends = {"u": 0, "v": 1}
    rows = [as_dgl_reads(x) for x in rows]
    values = [x.index_select(0, context.ends[ends[of]]) if of in ends else x for of, x in zip(letters, rows)]
    if parts[0] == "copy":
        return values[0]
    dims = max(x.dim() for x in values)
    a, b = (x.reshape(x.size(0), *[1] * (dims - x.dim()), *x.shape[1:]) for x in values)
    return (a * b).sum(-1, keepdim=True) if parts[1] == "dot" else _BINARY[parts[1]](a, b)


BUILTINS = frozenset(
    ["copy_u", "copy_e"]
    + [f"{a}_{op}_{b}" for a in "uve" for b in "uve" if a != b for op in ("add", "sub", "mul", "div", "dot")]
)
