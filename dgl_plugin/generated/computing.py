"""Computes recorded values: by one program, or by DGL's own functions over all edges."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from edgeless.autocast import rounds_to
from edgeless.checks import PLAIN
from edgeless.programs import DESTINATION, EDGE, FIRST, NODE, PARAMETER, SOURCE, Argument, ProgramCache, Refused, Space
from edgeless.programs.layers import (
    check_graph,
    check_settled,
    write_back,
)

from .._framework import stock_ops, zero_for_infinite
from . import expressions
from .expressions import FOLD, Value

if TYPE_CHECKING:
    from edgeless.programs.program import Program

    from .recorder import Recorder

PROGRAMS = ProgramCache()
LEAST_WIDTH = 4  # elements per edge; for fewer, DGL's ops were measured to be as fast on the CPU
apart: weakref.WeakSet[Any] = weakref.WeakSet()  # layers whose wide products by edge torch computes
WIDE = 32  # elements per edge; narrower products cost a walk little
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
_ANYWAY = " (EDGELESS_GENERATE=on runs a program all the same)"


def by_program(recorder: Recorder, values: list[Value], order: list[Value]) -> list[Tensor]:
    """Computes the tensors of values by a program.

    Args:
        order: all values that they depend on, each after its inputs.
    Raises:
        Refused: there is no program, or it would be slower.
    """
    if recorder.choice == "auto" and recorder.device.type == "cpu" and all(map(_is_op_of_dgl, values)):
        raise _for_good(f"DGL has an op for it that is as fast on the CPU{_ANYWAY}")
    one_set = recorder.sizes.one_set
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
            _check_plain(value.tensor, recorder.device)
            tensors.append(value.tensor)
            spaces.append(space)
            written.append(value.written)
        elif value.written != written[place]:
            raise Refused("a tensor is both written and read")
        places[id(value)] = place
    described = tuple(
        (t.dtype, space, tuple(n for d, n in enumerate(t.shape) if not (space.rows and d == space.dim)), w)
        + (recorder.grad and t.requires_grad,)
        for t, space, w in zip(tensors, spaces, written)
    )
    key = (
        *(expressions.structure_key(order, values, places), described, one_set, recorder.device, recorder.grad),
        *(rounds_to(recorder.device.type), torch.get_default_dtype()),
    )
    if key not in PROGRAMS:
        try:
            check_settled(recorder.layer)
        except Refused as error:
            raise _for_good(str(error)) from None
    wanted = [FIRST + i for i, t in enumerate(tensors) if recorder.grad and t.requires_grad and t.is_floating_point()]

    def arguments() -> list[Argument]:
        ends = torch.zeros(2, 1, dtype=torch.int64, device=recorder.device)
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
        raise _for_good(str(error)) from None
    if recorder.counts[EDGE] < program.least_edges:
        raise Refused("a norm over one edge is an error of the layer's")
    if program.landing is None and recorder.choice == "land":
        raise Refused("EDGELESS_GENERATE=land, and it lands on no op")
    if recorder.choice == "auto" and recorder.device.type == "cpu" and program.width < LEAST_WIDTH:
        raise _for_good(f"on the CPU DGL's ops on {program.width} numbers an edge are as fast{_ANYWAY}")
    if recorder.choice == "auto" and recorder.device.type == "cpu":
        if program.form is None:
            program.form = _walks_with_products(program)
        if program.form > 1:
            apart.add(recorder.layer)
            raise Refused(f"{program.form} of its walks would compute wide products of the same edges{_ANYWAY}")
    check_graph(program, recorder.handle, recorder.choice)
    results = program(recorder.handle, tensors, recorder.seed() if recorder.dropouts else None)
    write_back(program, tensors, results)
    recorder.ran.append(program)
    return results[: program.results]


def _walks_with_products(program: Program) -> int:
    """The number of the forward's walks that multiply wide edge rows by matrices, which one op of torch does faster."""
    from edgeless.programs.front.rules import name_of, shape_of, space_of  # importing the tracer takes long

    def is_product(node) -> bool:
        if name_of(node) not in _PRODUCTS or space_of(node).kind != EDGE:
            return False
        rows = node.args[_PRODUCTS[name_of(node)]]
        return shape_of(rows)[-1] >= WIDE

    return sum(any(map(is_product, walk.ops)) for walk in program.plan.walks())


def _for_good(reason: str) -> Refused:
    """A refusal that holds for every call of the form."""
    refusal = Refused(reason)
    refusal.for_good = True
    return refusal


def _is_op_of_dgl(value: Value) -> bool:
    """Returns whether DGL computes a value from tensors in one op, without another tensor by edge.

    Two cases were measured slower than a program and are excluded: a narrow edge operand with a wide node operand, and
    a dot product.
    """
    folds = value.op in FOLD.values()
    message = value.args[0] if folds else value
    if getattr(message.op, "name", "") != "builtin" or any(each.op is not None for each in message.inputs):
        return False
    name, widths = message.op.options[0], {each.shape[1:] for each in message.inputs}
    if name.startswith("copy"):
        return True
    return "dot" not in name and (not folds or ("e" in name.split("_") and len(widths) == 1))


def _check_plain(tensor: Tensor, device: torch.device) -> None:
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex():
        raise Refused(f"an argument is a {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype}")
    if is_lazy(tensor):
        raise Refused("a parameter is not initialised")
    if tensor.device != device:
        raise Refused("the tensors are on several devices")
    if torch.is_grad_enabled() and tensor.is_inference():
        raise Refused("a tensor was made in inference mode, which keeps it from being saved for gradients")


def by_ops(recorder: Recorder, values: list[Value]) -> list[Tensor]:
    """Computes the tensors of values by functions of DGL and torch."""
    known: dict[int, Any] = {}

    def get(value: Value):
        if value.op is None:
            return value.tensor
        if id(value) not in known:
            known[id(value)] = _by_op(recorder, value, get)
        return known[id(value)]

    return [get(value) for value in values]


def _by_op(recorder: Recorder, value: Value, get) -> Any:
    op = value.op
    if isinstance(op, expressions.GraphOp):
        found = _by_graph_op(recorder, op, value, get)
        if found is not None:
            return found.detach() if value.stopped else found
    return expressions.compute_one(value, recorder.context(), get)


def _by_graph_op(recorder: Recorder, op: expressions.GraphOp, value: Value, get) -> Optional[Tensor]:
    if op.name == "builtin":
        return getattr(stock_ops, op.options[0])(recorder.graph, *map(get, value.args))
    if op == expressions.EDGE_SOFTMAX:
        return stock_ops.edge_softmax(recorder.graph, get(value.args[0]))
    if op.name != "fold":
        return None
    (reduce,), message = op.options, value.args[0]
    fused = None
    if message.op is not None and getattr(message.op, "name", "") == "builtin":
        fused = getattr(stock_ops, f"{message.op.options[0]}_{reduce}", None)
    if fused is not None and not message.stopped:
        result = fused(recorder.graph, *map(get, message.args))
    else:
        result = getattr(stock_ops, f"copy_e_{reduce}")(recorder.graph, get(message))
    return zero_for_infinite(result) if reduce in ("min", "max") else result
