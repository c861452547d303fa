"""The check of a program at its first use: on a small random graph in float64 it must agree with the original function.

The check is the only guard against what a trace cannot see, such as closures that change. The first sample has rows of
the call's own tensors, so that ids stay valid and numbers in their range. The second has random numbers instead, since
parameters often begin as zeros, which hide errors.

The sample has self loops. Where a layer divides by the distance of an edge's ends, self loops have huge gradients that
cancel, and the layer's own result depends on the order of the edges. Such a sample decides nothing; the check is
repeated without self loops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..graph.handle import Graph
from .autograd import Run
from .front.modes import Modes
from .front.spaces import EDGE, FIRST, Argument, Refused, Sizes
from .program import Program
from .run.agreement import TOLERANCE, agree
from .run.interpreter import keeping_examples

if TYPE_CHECKING:
    from .derivatives import Derivative

_SIZES, _ONE_SET = (11, 14, 58), (13, 13, 58)
_BLOCK = 9
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NOISE = 100  # a difference up to this multiple of the change under another edge order is rounding


class _Differs(Refused):
    """A value differs from the function's; ``difference`` is relative by norm."""

    def __init__(self, what: str, a: Tensor, b: Tensor):
        self.difference = _relative(a, b)
        super().__init__(f"a {what} differs from the layer's own, {_difference(a, b)}")


def check(program: Program, function: Callable, arguments: Sequence[Argument], one_set: bool) -> None:
    """Compares a program with the function that it was traced from, values and gradients.

    Args:
        function, arguments, one_set: as given to :class:`Program`; the arguments' values are read and not changed.
    Raises:
        Refused: they differ, or the function fails on the sample.
    """
    sizes = Sizes(*(_ONE_SET if one_set else _SIZES))
    try:
        _check_on(program, function, arguments, sizes, loops=True)
    except _Differs as found:
        noise = _change_by_order(program, function, arguments, sizes) if one_set else 0.0
        is_noise = noise > TOLERANCE and found.difference <= _NOISE * noise  # false for NaN
        if not is_noise:
            raise
        _check_on(program, function, arguments, sizes, loops=False)


def check_derivative(derivative: Derivative, program: Program, arguments: Sequence[Argument]) -> None:
    """Compares the gradients that a derivative computes, and their own gradients, with those by ops over all edges.

    Args:
        arguments: the arguments of ``derivative``; their values are read and not changed.
    Raises:
        Refused: they differ.
    """
    one_set = program.sizes.one_set
    sizes, generator = Sizes(*(_ONE_SET if one_set else _SIZES)), torch.Generator().manual_seed(21)
    ends = sample_ends(sizes, generator, loops=not one_set)  # the length of a self loop has no second derivative
    graph = Graph.from_edge_index(ends if program.receiving == 1 else ends.flip(0), *_node_counts(sizes, program))
    with torch.random.fork_rng(devices=()), in_double(program), in_double(derivative), keeping_examples():
        for own in (True, False):
            tensors = [sample(a, sizes, generator, own) for a in arguments[FIRST:]]
            ours, theirs = ([ends, ends[0], _seed(), *(t.clone() for t in tensors)] for _ in range(2))
            for each in (ours, theirs):
                for position in derivative.wanted:
                    each[position].requires_grad_(True)
            with torch.no_grad():
                kept = program.forward(ours[: len(program.arguments)], graph, block=_BLOCK)[len(program.outputs) :]
            given = {node: kept[place] for node, place in derivative.given_by}
            got = Run.apply(derivative, graph, given, {"block": _BLOCK}, *ours)
            expected = _by_plain_ops(program, graph, theirs, derivative.chosen)
            _compare_gradients(derivative, (ours, got), (theirs, expected), generator)


def _by_plain_ops(program: Program, graph: Graph, arguments: list[Tensor], chosen: Sequence[int]) -> list[Tensor]:
    count = len(program.arguments)
    own = list(arguments[:count])
    for position in chosen:
        own[position] = own[position].view_as(own[position])
        if not own[position].requires_grad:
            own[position].requires_grad_(True)
    results = program.run_whole(graph, own)[: program.results]
    pairs = [(r, c) for r, c in zip(results, arguments[count:]) if r.requires_grad]
    found = torch.autograd.grad(
        [r for r, _ in pairs], [own[p] for p in chosen], [c for _, c in pairs], create_graph=True, allow_unused=True
    )
    return [torch.zeros_like(own[p]) if g is None else g for p, g in zip(chosen, found)]


def _compare_gradients(derivative: Derivative, ours: tuple, theirs: tuple, generator) -> None:
    for a, b in zip(ours[1], theirs[1]):
        if not agree(a, b):
            raise _Differs("gradient", a, b)
    weights = [torch.randn(b.shape, generator=generator, dtype=b.dtype) for b in theirs[1]]
    second = []
    for given, firsts in (ours, theirs):
        pairs = [(f, w) for f, w in zip(firsts, weights) if f.requires_grad]
        wanted = [given[p] for p in derivative.wanted]
        found = [None] * len(wanted)
        if pairs:
            found = torch.autograd.grad([f for f, _ in pairs], wanted, [w for _, w in pairs], allow_unused=True)
        second.append([torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted)])
    for a, b in zip(*second):
        if not agree(a, b):
            raise _Differs("second derivative", a, b)


def _check_on(program: Program, function: Callable, arguments: Sequence[Argument], sizes: Sizes, loops: bool) -> None:
    generator = torch.Generator().manual_seed(20)
    ends = sample_ends(sizes, generator, loops)
    graph = Graph.from_edge_index(ends if program.receiving == 1 else ends.flip(0), *_node_counts(sizes, program))
    with torch.random.fork_rng(devices=()), torch.enable_grad(), in_double(program), keeping_examples():
        for own in (True, False):
            tensors = [sample(a, sizes, generator, own) for a in arguments[FIRST:]]
            _compare(program, function, sizes, ends, graph, arguments[FIRST:], tensors, generator)


def _node_counts(sizes: Sizes, program: Program) -> tuple[int, int]:
    counts = (sizes.sources, sizes.destinations)
    return counts if program.receiving == 1 else counts[::-1]


def _change_by_order(program: Program, function: Callable, arguments: Sequence[Argument], sizes: Sizes) -> float:
    """The change of the function's own gradients, relative by norm, if the sample's edges come in another order."""
    generator = torch.Generator().manual_seed(20)
    ends = sample_ends(sizes, generator, loops=True)
    order = torch.randperm(sizes.edges, generator=generator)
    wanted = [p for p in program.wanted if arguments[p].space.kind != EDGE]
    most = 0.0
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        for own in (True, False):
            given = [sample(a, sizes, generator, own) for a in arguments[FIRST:]]
            found = []
            for edges in (torch.arange(sizes.edges), order):
                tensors = [
                    t.index_select(a.space.dim, edges) if a.space.kind == EDGE and a.space.rows else t.clone()
                    for t, a in zip(given, arguments[FIRST:])
                ]
                for position in wanted:
                    tensors[position - FIRST].requires_grad_(True)
                outputs = _called(program, function, sizes, ends[:, edges], edges, tensors)
                sums = [o.square().sum() for o in outputs if o.requires_grad]
                if not sums or not wanted:
                    return 0.0
                found.append(torch.autograd.grad(sum(sums), [tensors[p - FIRST] for p in wanted], allow_unused=True))
            most = max([most, *(_relative(a, b) for a, b in zip(*found) if a is not None)])
    return most


def sample_ends(sizes: Sizes, generator, loops: bool) -> Tensor:
    """Draws edges, with multi-edges, self loops if possible, and a node without edges at each end. The last nodes have
    edges.

    Args:
        loops: whether self loops are kept; else, for one set of nodes, each self loop ends at another node.
    """
    ends = torch.stack(
        [torch.randint(1, n, (sizes.edges,), generator=generator) for n in (sizes.sources, sizes.destinations)]
    )
    ends[:, 1] = ends[:, 0]
    ends[:, 2] = torch.tensor([sizes.sources, sizes.destinations]) - 1
    ends[:, 3:5] = 2
    if not loops:
        same = ends[0] == ends[1]
        ends[1] = torch.where(same, ends[1] % (sizes.destinations - 1) + 1, ends[1])
    return ends


def sample(argument: Argument, sizes: Sizes, generator, own: bool) -> Tensor:
    """A sample of an argument: rows of its own tensor, or random numbers."""
    value, space = argument.value.detach(), argument.space
    if space.rows:
        rows = sizes.of(space.kind)
        if value.size(space.dim) == 0:
            value = value.new_zeros([1 if d == space.dim else n for d, n in enumerate(value.shape)])
        drawn = torch.randint(value.size(space.dim), (rows,), generator=generator)
        value = value.index_select(space.dim, drawn.to(value.device)).cpu()  # few rows of a tensor that may be large
    else:
        value = value.cpu().clone()
    if not value.is_floating_point():
        return value
    value = value.double()
    if space.rows and not own:
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    if own:
        return value * (1 + 0.1 * noise) if space.rows else value
    return value + 0.2 * noise


def _seed() -> Tensor:
    return torch.tensor([7])


def _called(program: Program, function: Callable, sizes: Sizes, ends: Tensor, ids: Tensor, tensors) -> list[Tensor]:
    """The results of the original function, with the dropout masks that the program draws."""
    seed = _seed()
    modes = Modes(ends, ids, seed, sizes, tracing=False) if program.draws else contextlib.nullcontext()
    with modes:
        return list(function(sizes, ends, ids, seed, *tensors))[: program.results]


def _compare(program, function, sizes, ends, graph, arguments, tensors, generator) -> None:
    wanted = [position - FIRST for position in program.wanted]
    ours, theirs = ([t.clone() for t in tensors] for _ in range(2))
    for given in (ours, theirs):
        for position in wanted:
            given[position].requires_grad_(True)
    try:
        expected = _called(program, function, sizes, ends, torch.arange(sizes.edges), theirs)
    except Exception as error:
        raise Refused(f"the layer itself fails on a sample, {type(error).__name__}: {str(error)[:160]}") from error
    written = [theirs[position - FIRST] for position in program.written]
    got = program(graph, ours, _seed(), block=_BLOCK)
    for what, a, b in zip(("result",) * program.results + ("buffer",) * len(written), got, [*expected, *written]):
        if not agree(a, b):
            raise _Differs(what, a, b)
    pairs = [(a, b) for a, b in zip(got, expected) if b.requires_grad]
    if not wanted or not pairs:
        return
    weights = [torch.randn(b.shape, generator=generator, dtype=b.dtype) for _, b in pairs]
    grads = [
        torch.autograd.grad(outputs, [given[p] for p in wanted], weights, allow_unused=True)
        for outputs, given in (([a for a, _ in pairs], ours), ([b for _, b in pairs], theirs))
    ]
    for position, a, b in zip(wanted, *grads):
        a, b = (torch.zeros_like(tensors[position]) if g is None else g for g in (a, b))
        if not agree(a, b):
            raise _Differs("gradient", a, b)


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and not {list(b.shape)}"
    return f"by {_relative(a, b):.1e} relative by norm"


def _relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


@contextlib.contextmanager
def in_double(program: Program):
    """Makes the program compute in float64 on the CPU: casts to shorter types become casts to float64."""
    changed, constants = [], []

    def cast(a):
        if isinstance(a, (list, tuple)):
            return type(a)(map(cast, a))
        if isinstance(a, torch.device):
            return torch.device("cpu")
        return torch.float64 if isinstance(a, torch.dtype) and a in _FLOATS else a

    for module in program.modules():
        for node in module.graph.nodes:
            args, kwargs = cast(tuple(node.args)), {name: cast(value) for name, value in node.kwargs.items()}
            if _types(args, kwargs) != _types(node.args, node.kwargs):
                changed.append((node, node.args, node.kwargs))
                node.args, node.kwargs = args, kwargs
            constant = getattr(module, node.target) if node.op == "get_attr" else None
            if constant is not None and (constant.dtype in _FLOATS or not constant.is_cpu):
                constants.append((module, node.target, constant))
                constant = constant.cpu()
                setattr(module, node.target, constant.double() if constant.dtype in _FLOATS else constant)
    try:
        if changed or constants:
            program.compile()
        yield
    finally:
        for node, args, kwargs in changed:
            node.args, node.kwargs = args, kwargs
        for module, name, value in constants:
            setattr(module, name, value)
        if changed or constants:
            program.compile()


def _types(args, kwargs) -> list:
    return [a for a in [*args, *kwargs.values()] if isinstance(a, (torch.dtype, torch.device))]
