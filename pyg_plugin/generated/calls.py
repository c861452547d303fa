"""Runs one call of a generated layer's ``propagate()`` or ``edge_updater()``: as a program, or by PyG's own method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch_geometric import EdgeIndex

from edgeless.checks import compiling
from edgeless.choices.backends import current_backend
from edgeless.layers.call_errors import add_call
from edgeless.layers.calls import OF_PROGRAMS, REFERENCE, looks_ahead, note_trace, ran_generated, ran_stock
from edgeless.programs import ProgramCache, Refused, worth
from edgeless.programs.layers import (
    OFF,
    SEEN,
    check_graph,
    check_settled,
    compiling_at_once,
    generate_choice,
    refuse_modes,
    write_back,
)

from ..conv import _HOOKS, sizes_of
from ..convert import for_stock, kind_of
from . import edge_values, known_forwards
from .edge_values import EdgeValue
from .messages import Call, JoinedCall, join_arguments
from .plain_edges import plain_edges
from .recalled import Recalled, Remembering, recall
from .stock_steps import ORIGINAL, overrides, stock_step, updates_edges

PROGRAMS = ProgramCache()
_ONE_TENSOR = pytree.tree_flatten(torch.empty(0))[1]


class NoProgram(Refused):
    """Raised where no call with this key can be a program."""


def run_step(layer, step: str, names, edge_index, args: tuple, kwargs: dict) -> Any:
    if known_forwards.STATE.traced:
        return stock_step(layer, step)(layer, edge_index, *args, **kwargs)
    scope = edge_values.scope_of(layer)
    if scope is None or compiling():
        return _run_alone(layer, step, names, edge_index, args, kwargs)
    with scope.at_work():
        if step == "propagate":
            scope.note_width(worth.width_of(kwargs))
        if not args and step == "propagate" and any(type(value) is EdgeValue for value in kwargs.values()):
            try:
                return _run_joined(layer, names, edge_index, kwargs)
            except Refused:
                pass
        if scope.pending:
            args, kwargs = edge_values.computed((args, kwargs))
            scope.settle()
        return _run_alone(layer, step, names, edge_index, args, kwargs, scope)


def _run_alone(layer, step: str, names, edge_index, args: tuple, kwargs: dict, scope=None) -> Any:
    defer, width = None, 1
    if scope is not None and step == "edge_updater" and _may_be_deferred(edge_index):
        defer, width = scope.defer, scope.width()
    if not args and not compiling():
        known = recall(layer, step, edge_index, kwargs, PROGRAMS)
        if known is not None and may_run_again(*known, kwargs, width):
            recalled, graph, tensors = known
            program = recalled.program
            later = None if defer is None else defer(edge_index, kwargs, program, graph, tensors)
            if later is not None:
                return later
            values = program(graph, tensors)
            ran_generated(layer, program.how, program.text)
            return results(layer, tensors, program, values)
    method = stock_step(layer, step)
    if compiling():
        note_trace(type(layer), False, OF_PROGRAMS)
        return method(layer, edge_index, *args, **kwargs)
    if _is_tiny(edge_index):
        ran_stock(type(layer), layer, (worth.OF_TINY,))
        return method(layer, edge_index, *args, **kwargs)
    try:
        with compiling_at_once():
            return _generated(layer, step, method, names, edge_index, args, kwargs, defer=defer, width=width)
    except Refused as error:
        refused = str(error)
    ran_stock(type(layer), layer, (refused,))
    try:
        return method(layer, for_stock(edge_index), *args, **kwargs)
    except Exception as error:
        if refused not in (REFERENCE, OFF):
            add_call(error, layer, {"edge_index": edge_index, **kwargs}, (refused,))
        raise


def _may_be_deferred(edge_index) -> bool:
    """Returns whether an ``edge_updater()`` may be deferred. By default it may not on CUDA, where that was not
    measured.
    """
    return type(edge_index) is Tensor and (edge_index.device.type != "cuda" or generate_choice() != "auto")


def _run_joined(layer, names, edge_index, kwargs: dict) -> Any:
    """Runs a ``propagate()`` and the calls of ``edge_updater()`` whose values it gets, as one program."""
    parts: list[edge_values.Pending] = []
    values = {}
    for name, value in kwargs.items():
        if type(value) is EdgeValue:
            if value.pending not in parts:
                parts.append(value.pending)
            values[name] = f"{parts.index(value.pending)} {value.place}"
    for part in parts:
        if part.values is not None or not part.is_unchanged():
            raise Refused("values of edges are computed before")
        if part.program.draws and (part.joined or len(parts) > 1):  # a seed gives equal masks only within one program
            raise Refused("values of edges with dropout are used again")
    joined = join_arguments(kwargs, parts, values, names, layer._edge_user_args)
    known = recall(layer, "joined", edge_index, joined, PROGRAMS, [part.program for part in parts])
    if known is not None and may_run_again(*known, joined):
        recalled, graph, tensors = known
        own = tensors[recalled.first_own :]
        if all(part.graph is graph and part.has_state(own) for part in parts):
            program = recalled.program
            result = results(layer, tensors, program, program(graph, tensors, parts[0].seed()))
            ran_generated(layer, program.how, program.text)
            for part in parts:
                part.joined = True
            return result
    method = stock_step(layer, "propagate")
    with compiling_at_once():
        result = _generated(layer, "propagate", method, names, edge_index, (), joined, parts=parts)
    for part in parts:
        part.joined = True
    return result


def _is_tiny(edge_index) -> bool:
    """Returns whether the upstream method certainly runs, so that a small call need not take the time of the other
    checks.
    """
    return (
        type(edge_index) is Tensor
        and edge_index.size(-1) < worth.TINY
        and edge_index.dtype is torch.int64
        and not looks_ahead()
        and generate_choice() == "auto"
    )


def _generated(layer, step: str, method, names, edge_index, args, kwargs, *, defer=None, width=1, parts=()) -> Any:
    choice = generate_choice()
    if choice == "auto" and isinstance(edge_index, Tensor) and edge_index.layout is torch.strided:
        worth.refuse_small(edge_index.size(-1), kwargs, edge_index.device, width)
    check_state(layer, step, choice)
    if args:
        if len(args) != 1 or method is not ORIGINAL[step]:
            raise Refused(f"{step}() is called with arguments by position")
        kwargs = {"size": args[0], **kwargs}
    kwargs = dict(kwargs)
    size = written_size = kwargs.pop("size", None)
    given = edge_index
    edge_index, counts, kwargs = plain_edges(layer, edge_index, kwargs, names)
    size = counts if counts is not None else sizes_of(size) if size is not None else None
    if step == "edge_updater":
        size = counts
    if not isinstance(size, (tuple, list, type(None))) or any(
        isinstance(n, torch.SymInt) for n in size or () if n is not None
    ):
        raise Refused("the sizes are no numbers")

    def make(num_edges: int) -> Call:
        if not parts:
            return Call(layer, method, names, num_edges, size, kwargs)
        edge_update = stock_step(layer, "edge_updater")
        return JoinedCall(layer, method, names, num_edges, size, kwargs, edge_update, layer._edge_user_args, parts)

    options = {"defer": defer, "width": width, "parts": parts}
    return run_call(layer, step, given, edge_index, kwargs, make, written_size, **options)


def run_call(
    layer,
    step: str,
    given,
    edge_index: Tensor,
    kwargs: dict,
    make: Callable,
    written_size,
    *,
    defer=None,
    width: int = 1,
    parts=(),
) -> Any:
    """Runs a call as a program, and returns what the upstream method would return.

    Args:
        given: the edges as the layer got them.
        edge_index: the edges as a tensor.
        make: a function from the number of edges to the :class:`Call`.
        written_size: the argument ``size`` as it was given.
        defer: for a call of ``edge_updater()``, a function that defers it and returns its :class:`EdgeValue`, or None.
        width: the elements per edge of a call of the layer that this one may become a part of.
        parts: the deferred calls of ``edge_updater()`` that are joined with this one.

    Raises:
        NoProgram: no call with this key can be a program.
        Refused: this call has to run by the upstream method.
    """
    choice, num_edges = generate_choice(), edge_index.size(1)
    if step == "forward":
        check_state(layer, step, choice)
    if choice == "auto":
        worth.refuse_small(num_edges, kwargs, edge_index.device, width)
    if num_edges < 1:
        raise Refused("there are no edges")
    call = make(num_edges)
    if call.device != edge_index.device or any(t.device != call.device for t in call.tensors):
        raise Refused("the tensors are on several devices")
    if min(call.counts) < 1:
        raise Refused("there are no nodes")
    if isinstance(given, EdgeIndex):
        kind, ends = kind_of(given), (call.counts[1 - call.receiving], call.counts[call.receiving])
        if (reason := kind.refusal(given, *ends, layer, False)) is not None:
            raise Refused(reason)
    if torch.is_grad_enabled() and any(t.is_inference() for t in call.tensors):
        raise Refused("a tensor was made in inference mode, which keeps it from being saved for gradients")
    if parts and not all(_is_as_deferred(call, part) for part in parts):
        raise Refused("the layer has changed since its edge_updater() was called")
    if step == "propagate" and not updates_edges(layer):  # otherwise its edge values are part of the program
        known_forwards.notice(layer, call)
    remembering = Remembering(call, layer, step, "joined" if parts else step)
    key = remembering.key()
    if key not in PROGRAMS:
        if torch._C._len_torch_dispatch_stack():  # the mode of a capture, which would watch the tracer
            raise Refused(SEEN)
        if choice == "auto" and not looks_ahead():
            worth.refuse_early(layer, num_edges, kwargs, call.device, width)
        check_settled(layer)
    try:
        program = PROGRAMS.get(
            key, call.run, call.arguments, call.one_set, call.receiving, call.wanted(), form=call.form
        )
    except Refused as error:
        raise NoProgram(str(error)) from error
    program.whole = step == "forward"
    if num_edges < program.least_edges:
        raise Refused("a norm over one edge is an error of the layer's")
    if program.landing is None and choice == "land":
        raise Refused("EDGELESS_GENERATE=land, and it lands on no op")
    try:
        graph = kind_of(given).graph(
            given, call.counts[1 - call.receiving], call.counts[call.receiving], layer.flow, False
        )
    except (IndexError, ValueError, TypeError) as error:
        raise Refused(f"the graph is refused: {error}") from error
    check_graph(program, graph, choice, width)
    if any(part.graph is not graph for part in parts):
        raise Refused("edge_updater() and propagate() are called for different graphs")
    remembering.keep(given, written_size, choice, program, PROGRAMS, [part.program for part in parts])
    later = None if defer is None else defer(given, kwargs, program, graph, call.tensors)
    if later is not None:
        return later
    values = program(graph, call.tensors, parts[0].seed() if parts else None)
    ran_generated(layer, program.how, program.text)
    return results(layer, call.tensors, program, values)


def _is_as_deferred(call: JoinedCall, part: edge_values.Pending) -> bool:
    """Returns whether a deferred call of ``edge_updater()`` would still have the same program and the same state."""
    alone = call.alone(part)
    return PROGRAMS.known(alone.key()) is part.program and part.has_state(alone.tensors[alone.first_own :])


def may_run_again(recalled: Recalled, graph, tensors: list[Tensor], kwargs: dict, width: int = 1) -> bool:
    """Returns whether a recalled program may run on a graph. If not, the full checks of a call find the reason."""
    program, num_edges = recalled.program, graph.num_edges
    approved = num_edges, graph.index_dtype
    if recalled.approved == approved and not program.needs_last:
        return True
    try:
        if recalled.choice == "auto":
            worth.refuse_small(num_edges, kwargs, graph.device, width)
        if num_edges < program.least_edges:
            return False
        check_graph(program, graph, recalled.choice, width)
    except Refused:
        return False
    if program.landing is not None or program.ready(graph):  # compiled code stays compiled
        recalled.approved = approved
    return True


def check_state(layer, step: str, choice: str) -> None:
    """Refuses a call because of the layer's state or torch's modes."""
    if choice == "off":
        raise Refused(OFF)
    if current_backend() == "reference":
        raise Refused(REFERENCE)
    if layer._explain:
        raise Refused("explain mode is on")
    if layer._decomposed_layers != 1:
        raise Refused(f"decomposed_layers is {layer._decomposed_layers}")
    if any(map(layer.__dict__.get, _HOOKS)):
        raise Refused("a message passing hook is registered")
    refuse_modes(edge_values.watches())
    if step != "forward" and overrides(type(layer), step):
        raise Refused(f"{step}() is overridden")


def results(layer, tensors: list[Tensor], program, values: list[Tensor]) -> Any:
    """Makes the upstream method's result of a program's values, and writes buffers and attributes as it does."""
    structure, writes = program.form
    write_back(program, tensors, values)
    if writes:
        modules = dict(layer.named_modules())
        for (path, name), value in zip(writes, values[structure.num_leaves :]):
            setattr(modules[path], name, value)
    if structure == _ONE_TENSOR:
        return values[0]
    return pytree.tree_unflatten(values[: structure.num_leaves], structure)
