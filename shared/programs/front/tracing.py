"""Traces a function of graph arguments to ATen ops, with primes for the numbers of nodes and edges."""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx import Node
from torch.fx.node import map_arg

from . import ops
from .modes import Modes, NoCustomFunctions, at
from .recording import Ops, record
from .spaces import Argument, Refused, Sizes, traced_sizes

aten = torch.ops.aten
_DECOMPOSITIONS = get_decompositions(
    [
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.native_group_norm,
        aten.native_group_norm_backward,
        aten._log_softmax_backward_data,
        aten.glu,
        aten.glu_backward,
        aten.hardswish,
        aten.hardswish_backward,
        aten._prelu_kernel_backward,
    ]
)
_DECOMPOSITIONS[aten.copy.default] = lambda base, rows, non_blocking=False: rows.to(base.dtype).expand(base.shape)
_DECOMPOSITIONS[aten.fill.Scalar] = torch.full_like
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SAME = (aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.lift.default)


class Traced:
    """A traced function.

    Attributes:
        module: the graph of its ATen ops, whose output is a tuple.
        sizes: the sizes that the graph was traced with.
        draws: whether it has dropout, and so needs a seed.
        needs_last: whether it holds only for graphs whose last node of both ends has an edge.
        least_edges: the least number of edges for which it holds.
        written: positions of the arguments that the function writes; their new values follow the outputs.
    """

    def __init__(self, module: Ops, sizes: Sizes, modes: Modes | None = None, written=()):
        self.module, self.sizes, self.written = module, sizes, list(written)
        self.draws = modes is not None and modes.draws > 0
        self.needs_last = modes is not None and modes.largest
        self.least_edges = 1 if modes is None else modes.least_edges


def stand_ins(arguments: Sequence[Argument], sizes: Sizes) -> list[Tensor]:
    """Tensors without contents that replace the arguments; to be called under a FakeTensorMode."""
    return [argument.stand_in(sizes) for argument in arguments]


def trace_function(function: Callable, arguments: Sequence[Argument], one_set: bool) -> Traced:
    """Traces ``function(sizes, *tensors)``, whose first three tensors are ``ends``, ``ids`` and ``seed``.

    It is traced twice, with large and with small sizes, and both traces must be equal up to multiples of the sizes.

    Raises:
        Refused: the function does something that programs do not support; the text names the line.
    """
    large, small = (_trace(function, arguments, traced_sizes(one_set, small)) for small in (False, True))
    _compare(large, small)
    return large


def _trace(function: Callable, arguments: Sequence[Argument], sizes: Sizes) -> Traced:
    seen: list[Modes] = []

    def run(*tensors):
        modes = Modes(*tensors[:3], sizes, tracing=True)
        seen.append(modes)
        with torch.enable_grad(), modes, NoCustomFunctions(modes):
            results = function(sizes, *tensors)
        if modes.reason:
            raise Refused(modes.reason)
        return tuple(results)

    try:
        module = _record(run, arguments, sizes, line=lambda: seen[-1].line if seen else None)
    except Refused:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise Refused(f"the values of a tensor decide what message() does{at(_line_of(error, seen))}") from error
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0][:160]
        if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
            text = "the values of a tensor decide"
        raise Refused(
            f"message() cannot be traced, {type(error).__name__}: {text}{at(_line_of(error, seen))}"
        ) from error
    return Traced(module, sizes, seen[-1], _writes(module, arguments))


def _record(
    function: Callable,
    arguments: Sequence[Argument],
    sizes: Sizes,
    functional: bool = True,
    line: Callable[[], str | None] | None = None,
) -> Ops:
    """The ops of a function; with ``line``, which returns the running line of user code, constants are checked."""
    called = torch.func.functionalize(function) if functional else function
    with _no_autocast_cache():
        module = record(called, lambda: stand_ins(arguments, sizes), _DECOMPOSITIONS, line or (lambda: None))
    for node in list(module.graph.nodes) if line else ():
        if node.op == "get_attr":
            _check_constant(node)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target is aten.full_like.default and node.args[0].target is aten.empty_like.default:
            node.args = (node.args[0].args[0], *node.args[1:])  # memory that the next op fills, as in silu
    module.graph.eliminate_dead_code()
    return module


def add_values(module: Ops, arguments: Sequence[Argument], sizes: Sizes) -> None:
    """Computes the shapes in a graph that a pass has made. Both results of an extremum get a node."""
    for node in list(module.graph.nodes):
        if node.target is ops.extremum:
            have = {user.args[1] for user in node.users}
            with module.graph.inserting_after(node):
                for place in {0, 1} - have:
                    module.graph.call_function(operator.getitem, (node, place))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = iter(stand_ins(arguments, sizes))
        for node in module.graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = next(tensors)
            elif node.op == "get_attr":
                node.meta["val"] = getattr(module, node.target)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def trace_gradients(
    module: Ops,
    arguments: Sequence[Argument],
    cotangents: Sequence[Argument],
    wanted: Sequence[int],
    sizes: Sizes,
    again: bool = False,
) -> tuple[Ops, list[bool], list[bool]]:
    """Traces a graph of all results of a traced function, followed by the gradients of the ``wanted`` arguments.

    The first ``len(cotangents)`` results are differentiated. Returns the graph; for each wanted argument, whether a
    differentiated result depends on it, since only then the graph has its gradient; and for each differentiated result,
    whether it depends on a wanted argument.

    Args:
        again: whether the graph will be differentiated once more and so must keep each detach() of the user.
    """
    given = [*arguments, *cotangents]
    depends: list[bool] = []
    differentiable: list[bool] = []

    def joint(*tensors):
        inputs, grads = list(tensors[: len(arguments)]), tensors[len(arguments) :]
        with torch.enable_grad():
            for position in wanted:
                inputs[position] = inputs[position].detach().requires_grad_(True)
            results = module(*inputs, instead={aten.detach.default: ops.stop} if again else {})
            differentiable[:] = [r.requires_grad for r, _ in zip(results, grads)]
            pairs = [(r, g) for r, g in zip(results, grads) if r.requires_grad]
            found = [None] * len(wanted)
            if pairs:
                outputs, weights = zip(*pairs)
                sources = [inputs[p] for p in wanted]
                found = torch.autograd.grad(outputs, sources, weights, create_graph=again, allow_unused=True)
        depends[:] = [grad is not None for grad in found]
        return (*(r.detach() for r in results), *(grad for grad in found if grad is not None))

    traced = _record(joint, given, sizes, functional=False)
    for node in list(traced.graph.nodes):  # autograd's own detach(); those of the user have had their effect
        if node.op == "call_function" and node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    if any(_writes_in_place(node) for node in traced.graph.nodes):  # autograd adds up gradients in place
        traced = _record(lambda *tensors: tuple(traced(*tensors)), given, sizes)
    for node in traced.graph.nodes:
        if node.target is ops.stop:
            node.target = aten.detach.default
    close_shapes(traced.graph.nodes)
    return traced, list(depends), list(differentiable)


def close_shapes(nodes: Iterable[Node]) -> None:
    """Writes the extent that a view leaves open, which no rows at all do not tell."""
    for node in nodes:
        if node.target in _RESHAPES and -1 in node.args[1]:
            node.args = (node.args[0], list(node.meta["val"].shape))


def _writes_in_place(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@contextlib.contextmanager
def _no_autocast_cache():
    """Turns off the cache of autocast, which would keep casts of stand-ins."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _check_constant(node: Node) -> None:
    """Refuses a constant that the function did not make of numbers: it could become stale, or lose its gradient."""
    if any(user.target not in _SAME for user in node.users):
        raise Refused(
            "message() reads a tensor that is no argument, parameter, buffer or attribute of the layer"
            + at(next(iter(node.users)).stack_trace)
        )


def _writes(module: Ops, arguments: Sequence[Argument]) -> list[int]:
    """Replaces writes into arguments by further outputs, and returns the positions of these arguments."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    output = next(node for node in module.graph.nodes if node.op == "output")
    written: dict[int, Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is aten.copy_.default:
            if node.args[0] not in placeholders:
                raise Refused(f"a tensor is written in place in a way that cannot be followed{at(node.stack_trace)}")
            position = placeholders.index(node.args[0])
            if not arguments[position].written:
                raise Refused(f"message() writes into its arguments{at(node.stack_trace)}")
            written[position] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            module.graph.erase_node(node)
    results = output.args[0]
    results = [results] if isinstance(results, Node) else list(results)
    output.args = ((*results, *written.values()),)
    module.graph.eliminate_dead_code()
    return list(written)


def _line_of(error: BaseException, seen: list[Modes]) -> str | None:
    """The innermost line of the user's code, or else of PyG's, in an error's traceback."""
    best = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = frame.filename.replace("\\", "/")
        if path.startswith("<") or "/torch/" in path or "/edgeless/" in path or "/shared/programs/" in path:
            continue
        best = f"{frame.filename}:{frame.lineno}"
    return (seen[-1].line if seen else None) or best


def _compare(large: Traced, small: Traced) -> None:
    """Refuses the function if its two traces are not equal up to multiples of the sizes."""
    ours, theirs = list(large.module.graph.nodes), list(small.module.graph.nodes)
    place, other = ({node: i for i, node in enumerate(nodes)} for nodes in (ours, theirs))
    if len(ours) != len(theirs) or large.written != small.written:
        raise Refused("what message() does depends on the number of nodes or edges")
    pairs = {(large.sizes.of(k), small.sizes.of(k)) for k in ("source", "destination", "edge")}

    def same(a, b) -> bool:
        if isinstance(a, Node):
            return isinstance(b, Node) and place[a] == other[b]
        if isinstance(a, (list, tuple)):
            return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, (int, float)) and not isinstance(a, bool):
            if a == b or (a != a and b != b):
                return True
            return any(a % n == 0 and a // n * m == b for n, m in pairs)
        return a == b

    for a, b in zip(ours, theirs):
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target):
            raise Refused(f"what message() does depends on the number of nodes or edges{at(a.stack_trace)}")
        if not same(a.args, b.args) or not same(tuple(a.kwargs.values()), tuple(b.kwargs.values())):
            raise Refused(f"a number is computed from the number of nodes or edges{at(a.stack_trace)}")


def outputs_of(module: Ops) -> list[Node]:
    """The results of a graph, as a list of nodes."""
    output = next(node for node in module.graph.nodes if node.op == "output").args[0]
    return [output] if isinstance(output, Node) else list(output)


def set_outputs(module: Ops, outputs: Sequence[Node]) -> None:
    """Makes these nodes the results of a graph, and removes ops that no result needs."""
    node = next(node for node in module.graph.nodes if node.op == "output")
    node.args = (tuple(outputs),)
    module.graph.eliminate_dead_code()
