"""A program: a traced function with the schedules of its forward and of its backward, as one function of autograd."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..functional.dropout import seed_tensor
from ..graph.handle import Graph
from .autograd import Run, as_traced
from .front import index_rules, ops, view_rules  # noqa: F401  registers rules
from .front.recording import Ops
from .front.rules import Inference, name_of, shape_of, space_of, value_of
from .front.spaces import EDGE, FIRST, Argument, Refused
from .front.tracing import add_values, outputs_of, set_outputs, trace_function, trace_gradients
from .run.blocks import sizes_of
from .run.interpreter import Interpreter, call_whole
from .scheduling import own_factors
from .scheduling.kept_sums import use_kept_sums
from .scheduling.passes import rewrite
from .scheduling.schedule import Schedule, Walk, is_fold, is_total, operands, schedule, steps_text, values_text


class Program:
    """A message function that runs on any graph.

    Args:
        function: called as ``function(sizes, ends, ids, seed, *tensors)``; returns a tuple of tensors.
        arguments: the arguments ``ends``, ``ids``, ``seed`` and the tensors.
        one_set: whether sources and destinations are the same nodes.
        receiving: the row of ``edge_index`` that holds the receiving nodes: 1, or 0 for the reverse flow.
        wanted: positions of the arguments whose gradients are computed.

    Raises:
        Refused: the function cannot run without an edge tensor, or its program might be wrong.

    Attributes:
        arguments: the arguments without their contents.
        given: nodes whose values are given besides the arguments; only the gradients of a program have some.
        derivatives: its gradients as programs, or the reason why there are none, by the requested gradients.
        parts: itself over parts of graphs, or the reason why it does not run there, by what travels between processes.
        draws, needs_last, least_edges, written: as in :class:`edgeless.programs.front.tracing.Traced`.
        notes: descriptions of what the passes did.
        form: a value that the caller keeps with the program.
        landing: the existing ops that compute it, or None.
        whole: whether it is a layer's whole forward, with what that computes by edge outside of its messages.
    """

    is_gradient = False  # True if its results are gradients of another program
    whole = False

    def __init__(
        self, function: Callable, arguments: Sequence[Argument], one_set: bool, receiving: int, wanted: Sequence[int]
    ):
        self.receiving, self.wanted = receiving, list(wanted)
        self.form: Any = None
        self.landing: Any = None
        # A program outlives the call that it was traced for, so it must not keep the tensors of that call.
        arguments = [argument.described() for argument in arguments]
        traced = trace_function(function, arguments, one_set)
        self.sizes, self.written, self.draws = traced.sizes, traced.written, traced.draws
        self.needs_last, self.least_edges = traced.needs_last, traced.least_edges
        infer = Inference(self.sizes)
        infer.annotate(traced.module, arguments)
        index_rules.normalise(traced.module, arguments)
        rewritten, self.notes = rewrite(traced.module, self.sizes, bool(self.wanted))
        self.module = rewritten
        add_values(self.module, arguments, self.sizes)
        infer.annotate(self.module, arguments)
        self.derivatives: dict[tuple, Program | str] = {}
        self.parts: dict[tuple, Program | str] = {}
        self._complete(infer, arguments)

    def _complete(self, infer: Inference, arguments: list[Argument], given: Sequence[Node] = ()) -> None:
        """Makes schedules of an annotated graph and of its gradients; the values of ``given`` nodes are known."""
        self.arguments, self.given = arguments, list(given)
        self.names = [argument.name for argument in arguments]
        _name_arguments(self.module, arguments)
        self.outputs = outputs_of(self.module)
        self.results = len(self.outputs) - len(self.written)
        self.plan = schedule(self.module, self.sizes, self.receiving, self.given)
        self.saved: list[Node] = []
        self.backward_plan: Schedule | None = None
        self.depends: list[bool] = []
        self.differentiable = [False] * self.results
        if self.wanted:
            self._add_backward(infer, arguments)
        self.loose = {p - FIRST for p, depends in zip(self.wanted, self.depends) if not depends}
        self.compile()

    def _add_backward(self, infer: Inference, arguments: list[Argument]) -> None:
        """Traces the gradients. The forward keeps the results of its folds that they need."""
        computed = {node for step in self.plan.steps for node in step.ops} | set(self.given)
        candidates = [
            node
            for node in self.module.graph.nodes
            if _is_kept(node) and (node.args[0] if node.target is operator.getitem else node) in computed
        ]
        set_outputs(self.module, [*self.outputs, *candidates])
        cotangents = self.cotangents()
        try:
            joint, self.depends, self.differentiable = trace_gradients(
                self.module, arguments, cotangents, self.wanted, self.sizes
            )
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"its gradients cannot be traced, {type(error).__name__}: {str(error)[:160]}") from error
        results = outputs_of(joint)
        first, last = len(self.outputs), len(self.outputs) + len(candidates)
        if use_kept_sums(joint, results[first:last]):
            self.notes.append("a sum of a softmax's gradient is computed on nodes")
        infer.annotate(joint, [*arguments, *cotangents])
        _name_arguments(joint, [*arguments, *cotangents])
        pairs = dict(zip(results[first:last], candidates))
        if not self.is_gradient and all(value_of(n).device.type in own_factors.DEVICES for n in self.outputs):
            sums = own_factors.keep_own_sums(joint, results[last:], self.module, len(arguments), self.receiving)
            if sums:
                self.notes.append("sums of its gradients are kept by the forward")
                pairs |= sums
                infer.annotate(self.module, arguments)
                infer.annotate(joint, [*arguments, *cotangents])
        set_outputs(joint, outputs_of(joint)[last:])
        alive = set(joint.graph.nodes)
        given = [node for node in pairs if node in alive and node.op == "call_function"]
        self.backward_plan = schedule(joint, self.sizes, self.receiving, given)
        used = {a for step in self.backward_plan.steps for node in step.ops for a in operands(node)}
        used |= set(self.backward_plan.outputs)
        self.backward_plan.given = [node for node in given if node in used]
        self.saved = [pairs[node] for node in self.backward_plan.given]
        set_outputs(self.module, [*self.outputs, *self.saved])
        self.plan = schedule(self.module, self.sizes, self.receiving, self.given)
        holders = [node for node in joint.graph.nodes if node.op == "placeholder"]
        own = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        pairs = enumerate(zip(holders, own))
        self.reads_once = {i for i, a in enumerate(holders[: len(arguments)]) if a in used}
        # Second derivatives compute the forward again. A wanted argument is differentiated even if nothing reads it.
        self.reads = {i for i, (a, b) in pairs if i >= 2 and (a in used or b.users or i in self.wanted)}

    def cotangents(self) -> list[Argument]:
        """The gradients of the results as arguments."""
        return [_like(node) for node in self.outputs[: self.results]]

    @property
    def how(self) -> str:
        """A description of how the program runs."""
        return "generated" if self.landing is None else f"landed on {self.landing.name}"

    @functools.cached_property
    def divides_extrema(self) -> bool:
        """True if the program computes gradients of extrema."""
        plans = [plan for plan in (self.plan, self.backward_plan) if plan is not None]
        return any(node.target is ops.share for plan in plans for step in plan.steps for node in step.ops)

    @functools.cached_property
    def width(self) -> int:
        """The largest number of elements that a value has for an edge."""
        sizes = [value_of(n) for n in self.module.graph.nodes if n.op != "output" and _is_by_edge(n)]
        return max((v.numel() // self.sizes.edges for v in sizes if isinstance(v, Tensor)), default=0)

    @functools.cached_property
    def products(self) -> float:
        """The multiplications per edge in products of edge values, divided by :attr:`width`."""
        made = [n for n in self.module.graph.nodes if name_of(n) in ("mm", "addmm") and _is_by_edge(n)]
        work = sum(value_of(n).numel() // self.sizes.edges * shape_of(n.args[-1])[0] for n in made)
        return work / max(self.width, 1)

    def walks(self) -> list[Walk]:
        """The walks of the forward and of the backward."""
        return [walk for plan in (self.plan, self.backward_plan) if plan is not None for walk in plan.walks()]

    def compile(self) -> None:
        """Makes the interpreters of the forward and of the backward."""
        self.forward = Interpreter(self.plan, self.receiving, backward=self.is_gradient)
        self.backward = Interpreter(self.backward_plan, self.receiving, backward=True) if self.backward_plan else None

    def ready(self, graph: Graph) -> bool:
        """Returns whether compiled code or generated kernels can run all walks; starts to compile the code that is
        missing.
        """
        if graph.device.type == "cuda":
            runs = [run for run in (self.forward, self.backward) if run is not None]
            return all(run.all_on_cuda(graph.device) for run in runs)
        ready = [walk.code.ready(graph, walk.end == self.receiving) for walk in self.walks()]  # starts all of them
        return all(ready)

    def may_run_compiled(self, graph: Graph) -> bool:
        """Returns whether walks that have compiled code may run it. In a program with gradients of extrema either all
        walks or none do, since the backward computes messages again to find equal ones, which must be rounded as in the
        forward.
        """
        return not self.divides_extrema or self.ready(graph)

    def modules(self) -> list[Ops]:
        """The graphs of the forward and of the backward."""
        return [plan.module for plan in (self.plan, self.backward_plan) if plan is not None]

    def __call__(self, graph: Graph, tensors: Sequence[Tensor], seed: Tensor | None = None, **options) -> list[Tensor]:
        """The results of the function on a graph, differentiable any number of times, then the new values of the
        arguments that it writes.

        Args:
            graph: a graph whose destinations are the nodes at the receiving end.
            tensors: the arguments behind ``ends``, ``ids`` and ``seed``.
            seed: the seed of dropout, int64 ``[1]``; None draws one from torch's generator.
        """
        if self.loose and torch.is_grad_enabled():  # a backward through a result that nothing reads may be a second one
            tensors = [t.detach() if i in self.loose else t for i, t in enumerate(tensors)]
        if self.landing is not None:
            with torch.autocast(graph.device.type, enabled=False):
                nothing = torch.empty(0, dtype=torch.int64)
                return self.landing(graph, [nothing, nothing, nothing, *tensors])
        if self.draws and seed is None:
            seed = seed_tensor(None, tensors[0].device if tensors else "cpu")
        given = [_NOTHING, _NOTHING, _NOTHING if seed is None else seed, *tensors]
        if self.wanted:
            return list(Run.apply(self, graph, {}, options, *given))
        with torch.no_grad():  # calling a function of autograd takes as long as a small walk
            return self.computed(given, graph, {}, options)[: len(self.outputs)]

    def computed(self, tensors: Sequence[Tensor], graph: Graph, given: dict[Node, Any], options: dict) -> list[Tensor]:
        """The results, then the values that the backward reads; ``given`` has the values of the ``given`` nodes."""
        with as_traced(graph.device):
            return self.forward(list(tensors), graph, given, **options)

    def run_whole(self, graph: Graph, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results by ops over all edges at once, which autograd differentiates any number of times.

        Args:
            tensors: all arguments; ``ends`` and ``ids`` are not read.
        """
        ends = graph.edge_index()
        ends = ends if self.receiving == 1 else ends.flip(0)
        ids = torch.arange(graph.num_edges, device=ends.device)
        sizes = sizes_of(graph, self.receiving)
        values: dict[Node, Any] = {}
        holders = iter([ends, ids, *tensors[2:]])
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(holders)
            elif node.op == "get_attr":
                values[node] = getattr(self.module, node.target)
            elif node.op == "call_function":
                values[node] = call_whole(node, values, self.sizes, sizes)
        return [values[node] for node in self.outputs]

    def text(self) -> str:
        """A description of both levels: what is computed, and how."""
        device = self.outputs[0].meta["val"].device
        for each in (self.forward, self.backward) if device.type == "cuda" else ():
            for walk in each.plan.walks() if each is not None else ():
                each.cuda_walk(walk, device)  # its kernels are known once it is lowered
        parts = [values_text(self.module), "forward:", steps_text(self.plan, self.receiving)]
        if self.backward_plan is not None:
            parts += ["backward:", steps_text(self.backward_plan, self.receiving)]
        return "\n".join(parts)


def _like(node: Node) -> Argument:
    """The gradient of a result as an argument."""
    value, space = value_of(node), space_of(node).plain()
    shape = [1 if space.rows and d == space.dim else int(n) for d, n in enumerate(value.shape)]
    value = torch.empty(shape, dtype=value.dtype, device="meta")
    return Argument(value, space, device=node.meta["val"].device, name=f"grad_of_{node.name}")


def _name_arguments(module: Ops, arguments: Sequence[Argument]) -> None:
    """Gives the placeholders the arguments' names, for the text."""
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, argument in zip(holders, arguments):
        if argument.name:
            node._rename("".join(c if c.isalnum() else "_" for c in argument.name))


def _is_by_edge(node: Node) -> bool:
    return space_of(node).kind == EDGE and not space_of(node).is_ends


def _is_kept(node: Node) -> bool:
    """Returns whether a forward may keep the value for its backward: a fold, a sum over all edges, or an extremum or
    its argument.
    """
    if node.target is operator.getitem:
        return is_fold(node.args[0])
    if node.op != "call_function":
        return False
    return node.target is ops.fold or (is_total(node) and isinstance(value_of(node), Tensor))


_NOTHING = torch.empty(0, dtype=torch.int64)
