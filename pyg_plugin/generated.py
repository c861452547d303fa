"""Layers whose ``propagate()`` the generator runs: PyG's that have no kernels of their own, and users'.

:class:`GeneratedLayer` stands before a layer's class and replaces its ``propagate()`` and ``edge_updater()``. Each call
runs as a program of :mod:`edgeless.programs`, or as the stock method wherever that is not surely right or would be
slower.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import message_passing as stock

from edgeless.checks import compiling
from edgeless.choices.backends import current_backend
from edgeless.layers.adapter import named
from edgeless.layers.call_errors import add_call
from edgeless.layers.calls import (
    OF_PROGRAMS,
    REFERENCE,
    NotFusedError,
    looks_ahead,
    note_trace,
    ran_generated,
    ran_stock,
    recording,
)
from edgeless.layers.explanation import Explanation
from edgeless.programs import ProgramCache, Refused, worth
from edgeless.programs.layers import (
    OFF,
    SEEN,
    GeneratedClasses,
    check_graph,
    check_settled,
    compiling_at_once,
    generate_choice,
    refuse_modes,
    write_back,
)

from . import edge_values, forwards, part_calls
from .conv import _HOOKS, Scriptable, sizes_of
from .convert import for_stock, kind_of
from .edge_values import EdgeValue
from .messages import Call, JoinedCall, join_arguments
from .plain_edges import plain_edges
from .recalled import Recalled, Remembering, recall

# The original methods, which PyG's generated ones of a class are faster copies of.
_ORIGINAL = {
    step: vars(stock.MessagePassing).get(f"_orig_{step}", vars(stock.MessagePassing)[step])
    for step in ("propagate", "edge_updater")
}
PROGRAMS = ProgramCache()
_ONE_TENSOR = pytree.tree_flatten(torch.empty(0))[1]


class NoProgram(Refused):
    """A refusal that holds for every call of its kind."""


class GeneratedLayer(Scriptable):
    """Mixin of layers whose messages the generator runs; it precedes the layer's class and has no state."""

    _runs_generated = _runs_on_parts = True

    def __call__(self, *args, **kwargs):
        if part_calls.has_part(args, kwargs):
            return part_calls.call(self, super().__call__, args, kwargs)
        if not _updates_edges(self) or compiling():
            return super().__call__(*args, **kwargs)
        return edge_values.call(self, super().__call__, args, kwargs)

    def __repr__(self) -> str:
        return named(self, super().__repr__())

    def propagate(self, edge_index, *args, **kwargs):
        """The stock method's result, without an edge tensor where a program can compute it."""
        return _run_step(self, "propagate", self._user_args, edge_index, args, kwargs)

    def edge_updater(self, edge_index, *args, **kwargs):
        """The stock method's result, of which nothing but the result itself has a row for each edge."""
        return _run_step(self, "edge_updater", self._edge_user_args, edge_index, args, kwargs)

    def forward(self, *args, **kwargs):
        """The stock forward, whose tensors by edge are not written where it runs as a program."""
        if type(forwards.LAYERS.get(self)) is str or forwards.STATE.traced or compiling():
            return super().forward(*args, **kwargs)
        return forwards.run(self, super().forward, args, kwargs)

    def _explanation(self, inputs: tuple, kwargs: dict, plan: bool) -> Explanation:
        """What :func:`edgeless.explain` says; it runs a copy of the layer once."""
        name = type(self).__name__
        layer = copy.deepcopy(self)
        on_part = part_calls.has_part(inputs, kwargs)
        refusals = contextlib.suppress(NotFusedError) if on_part else contextlib.nullcontext()
        with torch.random.fork_rng(devices=[]), recording(ahead=True) as calls, refusals:
            if _updates_edges(layer) and not on_part:  # whose calls know how wide the propagate() of the one before was
                layer(*inputs, **kwargs)
                calls.clear()
            layer(*inputs, **kwargs)
        if forwards.runs_whole(layer):  # from the next call on
            with torch.random.fork_rng(devices=[]), recording(ahead=True) as calls:
                layer(*inputs, **kwargs)
        told = [explanation for of, explanation in calls if isinstance(of, GeneratedLayer)]
        reasons = dict.fromkeys(reason for found in told for reason in found.reasons)
        if not told:
            reasons = {"it does not propagate messages by itself": None}
        how = "; ".join(dict.fromkeys(found.how for found in told if found.fused))
        texts = "\n".join(dict.fromkeys(found.levels for found in told if found.levels)) if plan else ""
        return Explanation(name, not reasons, tuple(reasons), how=how, levels=texts)

    # PyG's ways of making and pickling layers -----------------------------------------------------------------------

    def _set_jittable_templates(self, *args, **kwargs):
        # PyG writes an optimized propagate() into the class of an instance, where it would hide ours.
        cls = type(self)
        if "_stock_steps_of" in vars(cls):
            return
        base = vars(cls).get("_generated_from")
        if base is not None:
            self.inspector._cls = base
            self.__class__ = base
        try:
            stock.MessagePassing._set_jittable_templates(self, *args, **kwargs)
        finally:
            self.__class__ = cls
        _keep_stock_steps(cls, base)

    def __reduce_ex__(self, protocol):
        base = vars(type(self)).get("_generated_from")
        if base is None:
            return super().__reduce_ex__(protocol)
        return _rebuild, (base,), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__

    def __prepare_scriptable__(self):
        base = vars(type(self)).get("_generated_from")
        cls = base or _scriptable(type(self))
        scriptable = cls.__new__(cls)
        scriptable.__dict__ = self.__dict__
        return scriptable


def _updates_edges(layer) -> bool:
    return type(layer).edge_update is not stock.MessagePassing.edge_update


class _MessagePassingType(type):
    """PyG's own layers, and ours with kernels, are instances of our MessagePassing as well."""

    def __instancecheck__(cls, instance) -> bool:
        if cls.__dict__.get("_is_base"):
            return isinstance(instance, stock.MessagePassing)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass) -> bool:
        if cls.__dict__.get("_is_base"):
            return issubclass(subclass, stock.MessagePassing)
        return super().__subclasscheck__(subclass)


class MessagePassing(GeneratedLayer, stock.MessagePassing, metaclass=_MessagePassingType):
    """The base of users' layers, :class:`torch_geometric.nn.MessagePassing` in all but how messages are computed.

    A class of a user's runs without an edge tensor where its ``message()``, ``aggregate()`` and ``update()`` can be
    traced; ``edgeless.explain(layer, *inputs)`` says whether, and if not, why.
    """

    _is_base = True
    stock = stock.MessagePassing


def _keep_stock_steps(cls: type, base: Optional[type]) -> None:
    """Notes the stock methods of a class, and takes those that PyG has written into it out of our methods' way."""
    steps = {}
    for step in _ORIGINAL:
        holder = base or cls
        written = vars(holder).get(step)
        if _is_template(written, holder, step):
            steps[step] = written
            if holder is cls:
                delattr(cls, step)
        else:
            steps[step] = None
    cls._stock_steps_of = steps


def stock_step(layer, step: str):
    """The stock method ``step`` of a layer, as a function of the layer."""
    if layer._explain or layer._decomposed_layers != 1:
        return _ORIGINAL[step]
    steps = vars(type(layer)).get("_stock_steps_of")
    if steps is None:  # made from an instance whose class PyG has completed
        _keep_stock_steps(type(layer), vars(type(layer)).get("_generated_from"))
        steps = vars(type(layer))["_stock_steps_of"]
    return steps[step] or _ORIGINAL[step]


_CLASSES = GeneratedClasses(GeneratedLayer)


def generated_class(cls: type, module: Optional[str] = None) -> type:
    """The class that is ``cls`` with :class:`GeneratedLayer` before it; the same one every time.

    Args:
        cls: a subclass of PyG's MessagePassing.
        module: the module that shows the class; by default that of ``cls``.
    """
    return _CLASSES.of(cls, module)


def class_to_swap(cls: type) -> Optional[type]:
    """The class that ``edgeless.accelerate`` gives to a layer of a class without kernels; None to leave it."""
    ours = hasattr(cls, "_fusion_refusals") or issubclass(cls, GeneratedLayer)
    if ours or generate_choice() == "off" or any(_overrides(cls, step) for step in _ORIGINAL):
        return None
    return _completed_class(cls)


def _rebuild(base: type):
    cls = _completed_class(base)
    return cls.__new__(cls)


def _completed_class(base: type) -> type:
    """The generated class for an instance of ``base`` that was made: torch.compile's tracer cannot complete a class."""
    cls = generated_class(base)
    if "_stock_steps_of" not in vars(cls):
        _keep_stock_steps(cls, base)
    return cls


def _scriptable(cls: type) -> type:
    """A class with PyG's own methods, which TorchScript compiles."""
    steps = {step: method for step, method in (vars(cls).get("_stock_steps_of") or {}).items() if method}
    return type(cls.__name__, (cls,), {**steps, "__module__": cls.__module__, "_stock_steps_of": {}})


# One call -----------------------------------------------------------------------------------------------------------


def _run_step(layer, step: str, names, edge_index, args: tuple, kwargs: dict) -> Any:
    if forwards.STATE.traced:
        return stock_step(layer, step)(layer, edge_index, *args, **kwargs)
    if type(edge_index) in part_calls.KINDS:
        return part_calls.run(layer, step, stock_step(layer, step), names, edge_index, args, kwargs)
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
        if known is not None and _may_run_again(*known, kwargs, width):
            recalled, graph, tensors = known
            program = recalled.program
            later = None if defer is None else defer(edge_index, kwargs, program, graph, tensors)
            if later is not None:
                return later
            values = program(graph, tensors)
            ran_generated(layer, program.how, program.text)
            return _results(layer, tensors, program, values)
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
    """Whether an ``edge_updater()`` of a graph may be left for later; on CUDA, where it was not measured, not yet."""
    return type(edge_index) is Tensor and (edge_index.device.type != "cuda" or generate_choice() != "auto")


def _run_joined(layer, names, edge_index, kwargs: dict) -> Any:
    """A ``propagate()`` with the calls of ``edge_updater()`` whose values it is given, as one program."""
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
        if part.program.draws and (part.joined or len(parts) > 1):  # a seed makes the numbers of one program
            raise Refused("values of edges with dropout are used again")
    joined = join_arguments(kwargs, parts, values, names, layer._edge_user_args)
    known = recall(layer, "joined", edge_index, joined, PROGRAMS, [part.program for part in parts])
    if known is not None and _may_run_again(*known, joined):
        recalled, graph, tensors = known
        own = tensors[recalled.first_own :]
        if all(part.graph is graph and part.has_state(own) for part in parts):
            program = recalled.program
            result = _results(layer, tensors, program, program(graph, tensors, parts[0].seed()))
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
    """Whether it is plain without a closer look that the stock method runs: looking takes time, and there it counts."""
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
    _check_state(layer, step, choice)
    if args:
        if len(args) != 1 or method is not _ORIGINAL[step]:
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
    """Runs a call as a program; returns the stock method's result.

    Args:
        given: the edges as the layer has got them.
        edge_index: the edges as a tensor.
        make: makes the :class:`Call` from the number of edges.
        written_size: the argument ``size`` as it was given.
        defer: of a call of ``edge_updater()``, puts it off and returns its values to be, or None.
        width: the most numbers that the layer has had for an edge elsewhere.
        parts: the calls of ``edge_updater()`` that are joined with this one.

    Raises:
        NoProgram: no call of this kind has a program.
        Refused: this one runs by the stock method.
    """
    choice, num_edges = generate_choice(), edge_index.size(1)
    if step == "forward":
        _check_state(layer, step, choice)
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
    if step == "propagate" and not _updates_edges(layer):  # whose values by edge are part of the program otherwise
        forwards.notice(layer, call)
    remembering = Remembering(call, layer, step, "joined" if parts else step)
    key = remembering.key()
    if key not in PROGRAMS:
        if torch._C._len_torch_dispatch_stack():  # of a capture, which would watch the tracer
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
    return _results(layer, call.tensors, program, values)


def _is_as_deferred(call: JoinedCall, part: edge_values.Pending) -> bool:
    """Whether a pending call of ``edge_updater()`` would have the same program now, for the same state."""
    alone = call.alone(part)
    return PROGRAMS.known(alone.key()) is part.program and part.has_state(alone.tensors[alone.first_own :])


def _may_run_again(recalled: Recalled, graph, tensors: list[Tensor], kwargs: dict, width: int = 1) -> bool:
    """Whether a program that is known runs on a graph; if not, the long way says why."""
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
    if program.landing is not None or program.ready(graph):  # what is compiled now stays so
        recalled.approved = approved
    return True


def _check_state(layer, step: str, choice: str) -> None:
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
    if step != "forward" and _overrides(type(layer), step):
        raise Refused(f"{step}() is overridden")


def _overrides(cls: type, step: str) -> bool:
    """Whether a class of a user's has its own driver."""
    known = {_ORIGINAL[step], GeneratedLayer.__dict__[step]}
    for base in cls.__mro__:
        found = vars(base).get(step)
        if found is not None and found not in known and not _is_template(found, base, step):
            return True
    return False


def _is_template(function: Any, cls: type, step: str) -> bool:
    """Whether a class's driver is the one that PyG writes for it."""
    return getattr(function, "__module__", "").endswith(f"_{cls.__name__}_{step}")


def _results(layer, tensors: list[Tensor], program, values: list[Tensor]) -> Any:
    """The stock method's result; buffers and attributes that it writes are written."""
    structure, writes = program.form
    write_back(program, tensors, values)
    if writes:
        modules = dict(layer.named_modules())
        for (path, name), value in zip(writes, values[structure.num_leaves :]):
            setattr(modules[path], name, value)
    if structure == _ONE_TENSOR:
        return values[0]
    return pytree.tree_unflatten(values[: structure.num_leaves], structure)
