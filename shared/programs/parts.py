"""Programs on the parts of a graph that processes share.

A part has its own nodes and all of their in-edges, so whatever is folded by destination is complete. The rows of
sources that other processes own must travel. A :class:`PartProgram` is a program over the bipartite graph from own and
foreign sources to own nodes, made from the graph of a program whose ends were the same nodes. What travels is a cut
through what is computed for the sources: the rows that edges gather, or the arguments that these are computed from.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.handle import Graph
from .autograd import as_traced
from .cache import without_hooks
from .checking import in_double, sample, sample_ends
from .front import ops
from .front.recording import record
from .front.rules import FACTORIES, Inference, is_pointwise, name_of, shape_of, space_of, value_of
from .front.spaces import DESTINATION, EDGE, FIRST, NODE, SOURCE, Argument, Refused, Sizes, Space, traced_sizes
from .front.tracing import add_values, close_shapes
from .program import Program
from .run.agreement import agree
from .run.interpreter import call_whole, keeping_examples
from .scheduling.schedule import is_fold, is_local, is_total

_SENDER, _RECEIVER = 0, 1  # rows of edge_index
_CROSSINGS = (ops.gather_rows, ops.fold, ops.extremum, ops.rows_with_edges)
_SAMPLE, _OWN = Sizes(13, 13, 58), 6
_groups: weakref.WeakKeyDictionary[Program, list[Group]] = weakref.WeakKeyDictionary()


class Group(NamedTuple):
    """Rows of sources that are computed from the same arguments: ``gathered`` by edges, from ``inputs``, which are the
    arguments at ``places``.
    """

    inputs: tuple[Node, ...]
    gathered: tuple[Node, ...]
    places: tuple[int, ...]

    @property
    def width(self) -> int:
        """The numbers that the gathered rows have for a node."""
        return sum(value_of(node).numel() // shape_of(node)[space_of(node).dim] for node in self.gathered)

    @property
    def can_send_gathered(self) -> bool:
        """Whether the gathered rows are others than the inputs, and rows of nodes as they are."""
        sizes = {shape_of(node)[space_of(node).dim] for node in (*self.gathered, *self.inputs)}
        return set(self.gathered) != set(self.inputs) and len(sizes) == 1


class PartProgram(Program):
    """A program over a part: the arguments of ``program``, then the rows of all sources of each ``sent`` value.

    Args:
        program: over a graph both of whose ends are the same nodes.
        sent: values of its sources of which rows travel.

    Raises:
        Refused: a row of its results needs more than the rows of its sources.
    """

    def __init__(self, program: Program, sent: Sequence[Node]):
        refuse(program)
        close_shapes(program.module.graph.nodes)  # a process may have no nodes
        self.origin, self.sent = program, list(sent)
        self.receiving, self.sizes = program.receiving, traced_sizes(False)
        self.form, self.landing, self.derivatives, self.parts = program.form, None, {}, {}
        self.written, self.notes, self.draws = [], list(program.notes), program.draws
        self.needs_last, self.least_edges = False, 1
        arguments = [_of_part(argument) for argument in program.arguments]
        arguments += map(_source_rows, self.sent)
        differentiated = _differentiated(program)
        travel = enumerate(self.sent, len(program.arguments))
        self.wanted = [*program.wanted, *(p for p, node in travel if node in differentiated)]
        self.module = record(self._on_part, lambda: [a.stand_in(self.sizes) for a in arguments])
        add_values(self.module, arguments, self.sizes)
        infer = Inference(self.sizes)
        infer.annotate(self.module, arguments)
        self._complete(infer, arguments)

    def _on_part(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The ops of the program where sources and destinations differ."""
        whole, sizes = self.origin, self.sizes
        given = iter(tensors)
        own: dict[Node, Any] = {node: next(given) for node in _holders(whole)}
        sources = _Computed(whole, Sizes(sizes.sources, sizes.sources, sizes.edges), own)
        sources.values.update((node, next(given)) for node in self.sent)
        counts = Sizes(sizes.destinations, sizes.destinations, sizes.edges)
        for node in whole.module.graph.nodes:
            if node.op == "get_attr":
                own[node] = getattr(whole.module, node.target)
            elif node.target is ops.gather_rows and node.args[2] == _SENDER:
                own[node] = ops.gather_rows(sources[node.args[0]], own[node.args[1]], *node.args[2:])
            elif node.op == "call_function":
                own[node] = call_whole(node, own, whole.sizes, counts)
        return tuple(own[node] for node in whole.outputs)

    @property
    def dims(self) -> list[int]:
        """The dimensions of what is sent that have the rows."""
        return [space_of(node).dim for node in self.sent]

    def rows_to_send(self, tensors: Sequence[Tensor], num_edges: int, isolated: Tensor | None) -> list[Tensor]:
        """The own rows of what is sent, differentiable.

        Args:
            tensors: the arguments of ``origin`` behind the first three.
            isolated: which own nodes are the source of no edge of the whole graph; None if there are none.
        """
        given = [torch.empty(0, dtype=torch.int64)] * FIRST + list(tensors)
        values: dict[Node, Any] = dict(zip(_holders(self.origin), given))
        if all(node in values for node in self.sent):
            return [values[node] for node in self.sent]
        rows = next(values[n].size(space_of(n).dim) for n in values if space_of(n).kind == NODE)
        computed = _Computed(self.origin, Sizes(rows, rows, num_edges), values, isolated, alone=True)
        with as_traced(value_of(self.sent[0]).device):
            return [computed[node] for node in self.sent]

    def on_part(self, graph: Graph, tensors: Sequence[Tensor], rows: Sequence[Tensor], **options) -> list[Tensor]:
        """The results.

        Args:
            graph: from the part's sources to its own nodes.
            tensors: the arguments of ``origin``, of own nodes and their in-edges.
            rows: what :meth:`rows_to_send` returns, of all sources.
            options: as of a program's call.
        """
        return self(graph, [*tensors, *rows], **options)


class _Computed:
    """Values of a program's graph for other numbers of rows, each computed when it is first read.

    Args:
        values: those that are known; of the others, with ``alone``, none but what is computed from these.
        isolated: where given, zeros are taken in these rows for what is computed of sources that have edges.
    """

    def __init__(
        self, program: Program, sizes: Sizes, known: dict, isolated: Tensor | None = None, alone: bool = False
    ):
        self.program, self.sizes, self.known, self.isolated, self.alone = program, sizes, known, isolated, alone
        self.values: dict[Node, Any] = {}

    def __getitem__(self, node: Node) -> Any:
        if node not in self.values:
            self.values[node] = self._compute(node)
        return self.values[node]

    def _compute(self, node: Node) -> Any:
        if node.op == "get_attr":
            return getattr(self.program.module, node.target)
        if node.op == "placeholder":
            if space_of(node).kind == NODE and not self.alone:
                raise Refused("the rows of an argument do not travel")
            return self.known[node]
        if is_fold(node):
            raise Refused("edges gather what other edges have summed, which a DistGraph has at other processes")
        if self.alone and node.target is ops.rows_with_edges:
            rows, dim = self[node.args[0]], node.args[3]
            return rows if self.isolated is None else ops.zeroed(rows, self.isolated, dim)
        return call_whole(node, self, self.program.sizes, self.sizes)


def groups(program: Program) -> list[Group]:
    """What the edges of a program gather from sources, by the arguments that it is computed from."""
    if program in _groups:
        return _groups[program]
    found: list[tuple[set[Node], list[Node]]] = []
    for node in program.module.graph.nodes:
        if node.target is not ops.gather_rows or node.args[2] != _SENDER:
            continue
        inputs, gathered = _node_arguments(node.args[0]), [node.args[0]]
        if not inputs:  # a constant, which every process has
            continue
        for other in [group for group in found if group[0] & inputs]:
            found.remove(other)
            inputs |= other[0]
            gathered += [each for each in other[1] if each not in gathered]
        found.append((inputs, gathered))
    order = {node: i for i, node in enumerate(program.module.graph.nodes)}
    holders, made = _holders(program), []
    for group in found:
        inputs, gathered = (tuple(sorted(side, key=order.__getitem__)) for side in group)
        made.append(Group(inputs, gathered, tuple(map(holders.index, inputs))))
    _groups[program] = made
    return made


def part_program(program: Program, sent: Sequence[Node], arguments: Callable[[], Sequence[Argument]]) -> PartProgram:
    """The program over parts by which rows of ``sent`` travel, made and checked at its first use.

    Args:
        arguments: returns the program's, with tensors of a call, of which the check makes samples.

    Raises:
        Refused: there is none.
    """
    key = tuple(sent)
    found = program.parts.get(key)
    if found is None:
        try:
            with without_hooks():
                found = PartProgram(program, sent)
                check(found, arguments())
        except Refused as error:
            found = str(error)
        except Exception as error:
            found = f"the generator fails, {type(error).__name__}: {str(error).strip()[:160]}"
        program.parts[key] = found
    if isinstance(found, str):
        raise Refused(found)
    return found


# What is refused ----------------------------------------------------------------------------------------------------


def refuse(program: Program) -> None:
    """Refuses a program of which a row of the results needs more than a part has.

    Raises:
        Refused: with the reason.
    """
    if program.receiving != _RECEIVER:
        raise Refused("a DistGraph has in-edges and the layer's flow is 'target_to_source'")
    if not program.sizes.one_set:
        raise Refused("the two ends of the edges have different numbers of rows, and a DistGraph has nodes of one kind")
    if program.written:
        raise Refused("a norm over all edges needs those of all processes")
    if program.needs_last:
        raise Refused("the number of nodes is computed from edge_index")
    holders = _holders(program)
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            _refuse_op(node, holders, program.sizes)
    by_edge = [a for a in program.arguments[FIRST:] if a.space.kind == EDGE]
    if program.draws and (by_edge or any(space_of(node).kind == EDGE for node in program.outputs)):
        raise Refused(
            "dropout is drawn by the edges' numbers in the whole graph, and tensors by edge have those of a part"
        )


def _refuse_op(node: Node, holders: list[Node], sizes: Sizes) -> None:
    name = name_of(node)
    if is_fold(node) and node.args[-4] != _RECEIVER:
        raise Refused("the edges that leave a node are at several processes, and their messages are summed")
    if node.target not in _CROSSINGS and holders[0] in node.all_input_nodes:
        raise Refused("the numbers of nodes are read, which are others in a part")
    if holders[1] in node.all_input_nodes and node.target not in (ops.extremum, ops.share, ops.dropout_scale):
        raise Refused("the numbers of edges are read, which are others in a part")
    factory = name in FACTORIES
    over = [a for a in node.all_input_nodes if space_of(a).rows and a not in holders[:2]]
    if is_total(node) or (over and not space_of(node).rows and not factory):
        raise Refused(f"{name} goes over all nodes or edges, which are at several processes")
    if not is_local(node) and node.target is not ops.rows_with_edges:
        raise Refused(f"{name} goes over all nodes, which are at several processes")
    if is_pointwise(node) or factory:
        for number in (*node.args, *node.kwargs.values()):
            if _is_size(number, sizes):
                raise Refused(f"{name} computes with the number of nodes or edges, of which a part has fewer")


def _is_size(number: Any, sizes: Sizes) -> bool:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number or number != number:
        return False
    return any(number % sizes.of(kind) == 0 for kind in (NODE, EDGE))


# Arguments ----------------------------------------------------------------------------------------------------------


def _holders(program: Program) -> list[Node]:
    """The arguments in a program's graph."""
    return [node for node in program.module.graph.nodes if node.op == "placeholder"]


def _node_arguments(node: Node) -> set[Node]:
    """The arguments with rows of nodes that a value is computed from."""
    found, stack, seen = set(), [node], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            found |= {node} if space_of(node).kind == NODE else set()
        else:
            stack.extend(node.all_input_nodes)
    return found


def _differentiated(program: Program) -> set[Node]:
    """The floating values of a program's graph that depend on an argument whose gradient is computed."""
    found: set[Node] = set()
    holders = _holders(program)
    wanted = {holders[position] for position in program.wanted}
    for node in program.module.graph.nodes:
        value = value_of(node)
        floats = isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.is_floating_point())
        if floats and (node in wanted or any(a in found for a in node.all_input_nodes)):
            found.add(node)
    return found


def _of_part(argument: Argument) -> Argument:
    space = argument.space
    if space.kind == NODE:
        space = Space(DESTINATION, space.dim)
    return Argument(argument.value, space, argument.written, argument.device, argument.name)


def _source_rows(node: Node) -> Argument:
    """The rows of all sources of a value as an argument."""
    value, space = value_of(node), space_of(node)
    shape = [1 if d == space.dim else int(n) for d, n in enumerate(value.shape)]
    meta = torch.empty(shape, dtype=value.dtype, device="meta")
    return Argument(meta, Space(SOURCE, space.dim), device=value.device, name=f"sources_of_{node.name}")


# The check ----------------------------------------------------------------------------------------------------------


def check(part: PartProgram, arguments: Sequence[Argument]) -> None:
    """Compares a program over a part with the one over the whole graph, on a sample in float64.

    Args:
        arguments: those of ``part.origin``, whose values are read and not changed.
    Raises:
        Refused: they differ.
    """
    whole, generator = part.origin, torch.Generator().manual_seed(22)
    ends = sample_ends(_SAMPLE, generator, loops=False)
    mine = ends[1] < _OWN
    graph = Graph.from_edge_index(ends, _SAMPLE.sources, _SAMPLE.destinations)
    seed = torch.tensor([7])
    if part.draws:  # by the numbers of the edges, which are then those of the whole graph
        mine = torch.arange(_SAMPLE.edges) < _SAMPLE.edges // 2
        ends[1] = torch.where(mine, ends[1] % _OWN, _OWN + ends[1] % (_SAMPLE.destinations - _OWN))
        graph = Graph.from_edge_index(ends, _SAMPLE.sources, _SAMPLE.destinations)
    local = Graph.from_edge_index(ends[:, mine], _SAMPLE.sources, _OWN)
    with torch.random.fork_rng(devices=()), torch.enable_grad(), in_double(whole), in_double(part), keeping_examples():
        for own in (True, False):
            tensors = [sample(a, _SAMPLE, generator, own) for a in arguments[FIRST:]]
            ours, theirs = ([t.clone() for t in tensors] for _ in range(2))
            for given in (ours, theirs):
                for position in whole.wanted:
                    given[position - FIRST].requires_grad_(True)
            expected = whole.run_whole(graph, [ends, ends[0], seed, *theirs])[: whole.results]
            expected = [_own_rows(e, n, mine) for e, n in zip(expected, whole.outputs)]
            rows = part.rows_to_send(ours, _SAMPLE.edges, None)
            cut = [_own_rows(t, holder, mine) for t, holder in zip(ours, _holders(whole)[FIRST:])]
            got = part.on_part(local, cut, rows, seed=seed)
            _compare(whole, (ours, got), (theirs, expected), generator)


def _own_rows(value: Tensor, node: Node, mine: Tensor) -> Tensor:
    """The part's rows of a value of the whole sample."""
    space = space_of(node)
    if space.kind == NODE:
        joined = value.size(space.dim) // _SAMPLE.sources
        return value.narrow(space.dim, 0, _OWN * joined)
    return value.index_select(space.dim, mine.nonzero().view(-1)) if space.kind == EDGE else value


def _compare(whole: Program, ours: tuple, theirs: tuple, generator) -> None:
    for a, b in zip(ours[1], theirs[1]):
        if not agree(a, b):
            raise Refused("a result over a part differs from that over the whole graph")
    pairs = [(a, b) for a, b in zip(ours[1], theirs[1]) if b.requires_grad]
    if not pairs:
        return
    weights = [torch.randn(b.shape, generator=generator, dtype=b.dtype) for _, b in pairs]
    found = []
    for side, (given, _) in enumerate((ours, theirs)):
        wanted = [given[p - FIRST] for p in whole.wanted]
        found.append(torch.autograd.grad([pair[side] for pair in pairs], wanted, weights, allow_unused=True))
    for position, a, b in zip(whole.wanted, *found):
        zero = torch.zeros_like(ours[0][position - FIRST])
        if not agree(zero if a is None else a, zero if b is None else b):
            raise Refused("a gradient over a part differs from that over the whole graph")
