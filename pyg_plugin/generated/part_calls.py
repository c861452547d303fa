"""Generated layers on a :class:`edgeless.distributed.DistGraph`.

The stock forward gets a stand-in for the edges, which it may pass to ``propagate()`` and ``edge_updater()`` and not
read: what it would compute of one part's edges, such as degrees or self loops, would silently be wrong. There the
program of the call runs over the part (:mod:`edgeless.programs.parts`), after an exchange of the narrowest rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, Optional

import torch
from torch import Tensor

from edgeless.distributed.graph import DistGraph
from edgeless.layers.calls import NotFusedError, looks_ahead, ran_generated, ran_stock, recording
from edgeless.layers.explanation import Explanation
from edgeless.programs import EDGE, FIRST, Refused, Space, worth
from edgeless.programs.layers import SEEN, check_settled, generate_choice
from edgeless.untraced import untraced

from ..conv import sizes_of
from . import calls
from .messages import Call
from .stock_steps import ORIGINAL, stock_step

_INFO = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "layout", "is_cuda", "is_sparse", "requires_grad")),
    *(Tensor.dim, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
}


class PartEdges(Tensor):
    """A tensor without contents in place of a DistGraph, for the time of one call.

    Attributes:
        graph: the DistGraph.
        layer: the layer that is called.
    """

    graph: DistGraph
    layer: Any

    @staticmethod
    def __new__(cls, graph: DistGraph, layer: Any):
        shape = (2, graph.num_edges)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.int64, device=graph.device)
        made.graph, made.layer = graph, layer
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        _refuse_read(func, args, kwargs)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _INFO:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        _refuse_read(func, args, kwargs)


KINDS = (PartEdges, DistGraph)


def _refuse_read(func, args: tuple, kwargs: Optional[dict]) -> NoReturn:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    layer = next(leaf for leaf in leaves if type(leaf) is PartEdges).layer
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    _refuse(layer, f"its forward reads edge_index ({name}), of which a process has only its part")


def has_part(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a DistGraph is among the arguments of a call."""
    return DistGraph in map(type, args) or DistGraph in map(type, kwargs.values())


@untraced
def call(layer, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A layer's call, with a stand-in for its DistGraph."""

    def given(value):
        return PartEdges(value, layer) if type(value) is DistGraph else value

    return forward(*map(given, args), **{name: given(value) for name, value in kwargs.items()})


def recorded(layer, inputs: tuple, kwargs: dict[str, Any]) -> list:
    """The (layer, explanation) of every layer that runs or is refused in a call, which exchanges nothing."""
    with torch.random.fork_rng(devices=[]), recording(ahead=True) as found, contextlib.suppress(NotFusedError):
        layer(*inputs, **kwargs)
    return found


def run(layer, step: str, names, edges, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``propagate()`` or ``edge_updater()`` on a part.

    Raises:
        NotFusedError: it cannot run there, with the reason.
    """
    try:
        if type(edges) is DistGraph:
            raise Refused("its forward() was called by itself, where a DistGraph needs a call of the layer")
        return _run(layer, step, stock_step(layer, step), names, edges.graph, args, dict(kwargs))
    except Refused as error:
        _refuse(layer, str(error))


def _refuse(layer, reason: str) -> NoReturn:
    ran_stock(type(layer), layer, (reason,))
    said = Explanation(type(layer).__name__, False, (reason,))
    raise NotFusedError(f"{said} The stock layer knows no edgeless.distributed.DistGraph.")


class _PartCall(Call):
    """A call whose nodes are those of a part."""

    def _other(self, name: str, value: Any):
        rows = value.size(0) if isinstance(value, Tensor) and value.dim() else -1
        if rows == self.num_edges:  # of as many nodes, a program would refuse to take the rows for edges'
            return self._add(name, value, Space(EDGE, 0))
        return super()._other(name, value)


def _run(layer, step: str, method: Callable, names, graph: DistGraph, args: tuple, kwargs: dict[str, Any]) -> Any:
    choice = generate_choice()
    calls.check_state(layer, step, choice)
    if choice == "land":
        raise Refused("EDGELESS_GENERATE=land, and on a DistGraph nothing lands on an op")
    if choice == "auto" and graph.device.type != "cpu":
        raise Refused(f"programs on parts of a graph were not measured on {graph.device.type}{worth.ANYWAY}")
    if args:
        if len(args) != 1 or method is not ORIGINAL[step]:
            raise Refused(f"{step}() is called with arguments by position")
        kwargs = {"size": args[0], **kwargs}
    count = graph.num_own
    size = kwargs.pop("size", None)
    if size is not None and any(n not in (None, count) for n in sizes_of(size) or (-1,)):
        raise Refused(f"size is {size}, and this process has {count} nodes of a DistGraph")
    program_call = _PartCall(layer, method, names, graph.num_edges, (count, count), kwargs)
    if any(t.device != graph.device for t in program_call.tensors):
        raise Refused("the tensors are on another device than the DistGraph")
    if torch.is_grad_enabled() and any(t.is_inference() for t in program_call.tensors):
        raise Refused("a tensor was made in inference mode, which keeps it from being saved for gradients")
    program, part = _programs(layer, program_call, graph)
    values = _computed(part, graph, program_call.tensors)
    ran_generated(layer, "generated over a part", part.text)
    return calls.results(layer, program_call.tensors, program, values)


def _programs(layer, program_call: Call, graph: DistGraph):
    """The program of a call, and the same over a part, by which the narrowest rows travel."""
    from edgeless.programs.parts import groups, part_program  # the tracer takes long to import

    key = program_call.key()
    if key not in calls.PROGRAMS:
        if torch._C._len_torch_dispatch_stack():
            raise Refused(SEEN)
        check_settled(layer)
    program = calls.PROGRAMS.get(
        key,
        program_call.run,
        program_call.arguments,
        program_call.one_set,
        program_call.receiving,
        program_call.wanted(),
        form=program_call.form,
    )
    sent = []
    for group in groups(program):
        rows = [program_call.tensors[place - FIRST] for place in group.places]
        narrower = group.can_send_gathered and not _sends_input(graph, rows, group.width)
        sent += group.gathered if narrower else group.inputs
    return program, part_program(program, sent, program_call.arguments)


def _sends_input(graph: DistGraph, rows: list[Tensor], width: int) -> bool:
    """Whether arguments travel rather than what is computed of them, ``width`` numbers for a node."""
    if len(rows) == 1 and rows[0].dim() == 2:
        return graph.sends_input(rows[0], width)
    return sum(t.shape[1:].numel() for t in rows) < width


def _computed(part, graph: DistGraph, tensors: list[Tensor]) -> list[Tensor]:
    isolated = graph.local.format("sources of no edge", lambda _: _isolated(graph))
    own = part.rows_to_send(tensors, graph.num_edges, isolated)
    device, ahead = graph.device, looks_ahead()  # where other processes do not take part
    first = [rows.movedim(dim, 0).contiguous() if dim else rows for rows, dim in zip(own, part.dims)]
    if ahead:
        every = [torch.cat((rows, rows.new_zeros(graph.num_halo, *rows.shape[1:]))) for rows in first]
    else:
        every = graph.sources(*first) if first else ()
    every = [rows.movedim(0, dim) if dim else rows for rows, dim in zip(every, part.dims)]
    if not part.draws:
        return part.on_part(graph.local, tensors, every)
    seed = torch.zeros(1, dtype=torch.int64, device=device) if ahead else graph.local.draw(device)
    return part.on_part(graph.local.numbered, tensors, every, seed=seed)


def _isolated(graph: DistGraph) -> Optional[Tensor]:
    """The own nodes that are the source of no edge of the whole graph, as a bool for each; None if there are none."""
    found = graph.out_degrees() == 0
    return found if bool(found.any()) else None
