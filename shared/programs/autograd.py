"""A program as a function of autograd. Its gradients are a program too (:mod:`edgeless.programs.derivatives`)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from ..autocast import autocasts
from ..graph.handle import Graph
from .front.spaces import Refused

if TYPE_CHECKING:
    from .program import Program

_AS_IT_IS = contextlib.nullcontext()


def as_traced(device: torch.device):
    """Turns off autocast, whose casts are ops of the trace, and the recording of gradients."""
    return torch.autocast(device.type, enabled=False) if autocasts(device.type) else _AS_IT_IS


class Run(torch.autograd.Function):
    """``apply(program, graph, given, options, *arguments)``: the results of a program.

    ``given`` has the values of the program's ``given`` nodes; ``options`` are the options of its interpreter.
    """

    @staticmethod
    def forward(ctx, program: Program, graph: Graph, given: dict[Node, Any], options: dict, *tensors):
        """The results, then the new values of the arguments that the program writes."""
        options = {"compiled": program.may_run_compiled(graph), **options}
        values = program.computed(tensors, graph, given, options)
        count = len(program.outputs)
        ctx.program, ctx.graph, ctx.options, ctx.count = program, graph, options, len(tensors)
        if program.backward is not None:
            kept = [t if i in program.reads else None for i, t in enumerate(tensors)]
            for position in program.written:  # the caller writes the new value there before the backward
                kept[position] = None if kept[position] is None else kept[position].clone()
            results = values[:count]  # the caller may overwrite them
            saved = [v.clone() if any(v is r for r in results) else v for v in values[count:]]
            # What only second derivatives read may be written in place, so autograd must not check its version.
            others = {p: t for p, t in enumerate(kept) if t is not None and p not in program.reads_once}
            ctx.others = {p: (t, t._version) for p, t in others.items()}
            ctx.save_for_backward(*[None if p in others else t for p, t in enumerate(kept)], *saved)
        results = tuple(values[:count])
        ctx.mark_non_differentiable(
            *results[program.results :], *(r for r, depends in zip(results, program.differentiable) if not depends)
        )
        return results

    @staticmethod
    def backward(ctx, *cotangents):
        """The gradients of the wanted arguments, differentiable under ``create_graph``."""
        program, count = ctx.program, ctx.count
        everything = ctx.saved_tensors  # raises if one was written in place; a checkpoint unpacks them only once
        tensors, saved = everything[:count], everything[count:]
        cotangents = cotangents[: program.results]
        batched = any(map(torch._C._functorch.is_batchedtensor, cotangents))
        given = dict(zip(program.backward_plan.given, saved))
        if torch.is_grad_enabled() or batched:
            tensors = list(tensors)
            for position, (tensor, version) in ctx.others.items():
                if tensor._version != version:
                    raise RuntimeError(
                        f"{program.names[position]} was written in place after the layer, whose gradients cannot be "
                        "differentiated then"
                    )
                tensors[position] = tensor
            grads = None if batched else _by_program(ctx, tensors, cotangents, saved)
            if grads is None:
                grads = _by_plain_ops(program, ctx.graph, tensors, cotangents)
            return (None, None, None, None, *grads)
        with as_traced(ctx.graph.device):
            found = iter(program.backward([*tensors, *cotangents], ctx.graph, given, **ctx.options))
        grads: list[Tensor | None] = [None] * count
        for position, depends in zip(program.wanted, program.depends):
            if depends:
                grads[position] = next(found)
        return (None, None, None, None, *grads)


def _by_program(ctx, tensors: list, cotangents: Sequence[Tensor], saved: Sequence[Any]) -> list[Tensor | None] | None:
    """Gradients by a program, which can be differentiated once more, or None where there is none."""
    from .derivatives import derivative_of, refuse_now  # imports the tracer

    program, graph = ctx.program, ctx.graph
    executed = _executed(ctx)
    chosen = [p for p, d in zip(program.wanted, program.depends) if d and executed[p]]
    again = [program.wanted, [ctx.count + i for i, c in enumerate(cotangents) if c.requires_grad]]
    try:
        found = derivative_of(program, chosen, [*again[0], *again[1]], [*tensors, *cotangents])
        refuse_now(found, program, graph, ctx.options["compiled"])
    except Refused as error:
        from ..layers.calls import ran_stock

        ran_stock("a generated layer's second derivative", None, (str(error),))
        return None
    given = {node: saved[place] for node, place in found.given_by}
    grads: list[Tensor | None] = [None] * ctx.count
    results = Run.apply(found, graph, given, ctx.options, *tensors, *cotangents)
    for position, grad in zip(found.chosen, results):
        grads[position] = grad
    return grads


def _executed(ctx) -> list[bool]:
    """For each argument, whether its gradient is requested: a force needs no gradients of parameters."""
    if len(ctx.next_functions) != ctx.count:  # some arguments are not tensors
        return [True] * ctx.count
    return [node is not None and _will_run(node) for node, _ in ctx.next_functions]


def _will_run(node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except (RuntimeError, AttributeError):  # a leaf whose gradient is requested, or another version of torch
        return True


def _by_plain_ops(program: Program, graph: Graph, tensors, cotangents) -> list[Tensor | None]:
    """Gradients by ops over all edges, which autograd can differentiate and vmap can batch over cotangents."""
    tensors = list(tensors)
    create_graph = torch.is_grad_enabled()
    positions = [p for p, depends in zip(program.wanted, program.depends) if depends]
    with torch.enable_grad():
        aliases = {p: tensors[p].view_as(tensors[p]) for p in positions}
    for position in positions:  # one tensor may be several arguments, each of which has a gradient of its own
        tensors[position] = aliases[position]
    with torch.autocast(graph.device.type, enabled=False), torch.enable_grad():
        outputs = program.run_whole(graph, tensors)[: program.results]
        wanted = [tensors[position] for position in positions]
        pairs = [(o, c) for o, c in zip(outputs, cotangents) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs], wanted, [c for _, c in pairs], create_graph=create_graph, allow_unused=True
        )
    grads: list[Tensor | None] = [None] * len(tensors)
    for position, grad in zip(positions, found):
        grads[position] = grad
    return grads
