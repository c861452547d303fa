"""Layers whose messages the generator runs: DGL's that have no kernels of their own, and users'.

:class:`GeneratedLayer` stands before a layer's class and replaces its ``forward()``: the stock forward runs with a
graph that records what is computed of all edges (:mod:`edgeless.dgl.recorded_graph`). That runs as programs of
:mod:`edgeless.programs`, or by DGL's functions wherever a program is not surely right or would be slower.
"""

from __future__ import annotations

import copy
import types
import weakref
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from edgeless.checks import compiling
from edgeless.choices.backends import current_backend
from edgeless.layers.adapter import named
from edgeless.layers.call_errors import add_call
from edgeless.layers.calls import OF_PROGRAMS, REFERENCE, looks_ahead, note_trace, ran_generated, ran_stock, recording
from edgeless.layers.explanation import Explanation
from edgeless.programs import EDGE, Refused, worth
from edgeless.programs.layers import OFF, GeneratedClasses, compiling_at_once, generate_choice, refuse_modes

from ._framework import DGLGraph
from .convert import relation_of
from .deferred import Deferred, Unrecorded, Watch, computed, watched_calls
from .generators import Generators
from .leavings import finish
from .recorded_graph import custom_functions, hand_over, put_back, recorded
from .recorder import Recorder

_STEPS = frozenset(("apply_edges", "update_all", "edge_softmax"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MOST_FORMS = 64
# What a layer's calls of a form were refused for, so that the stock forward runs them from then on.
_refused: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()


class GeneratedLayer:
    """Mixin of layers whose messages the generator runs; it precedes the layer's class and has no state."""

    _runs_generated = True

    def __repr__(self) -> str:
        return named(self, super().__repr__())

    def forward(self, *args, **kwargs):
        """The stock forward's result, without an edge tensor where programs can compute it."""
        return _run(self, super().forward, args, kwargs)

    def _explanation(self, inputs: tuple, kwargs: dict, plan: bool) -> Explanation:
        """What :func:`edgeless.explain` says; it runs a copy of the layer once."""
        layer = copy.deepcopy(self)
        with torch.random.fork_rng(devices=[]), recording(ahead=True) as calls:
            layer(*inputs, **kwargs)
        told = [explanation for of, explanation in calls if isinstance(of, GeneratedLayer)]
        reasons = dict.fromkeys(reason for found in told for reason in found.reasons)
        if not told:
            reasons = {"it computes nothing on the edges of a graph by itself": None}
        how = "; ".join(dict.fromkeys(found.how for found in told if found.fused))
        texts = "\n".join(dict.fromkeys(found.levels for found in told if found.levels)) if plan else ""
        return Explanation(type(self).__name__, not reasons, tuple(reasons), how=how, levels=texts)

    def __reduce_ex__(self, protocol):
        base = vars(type(self)).get("_generated_from")
        if base is None:
            return super().__reduce_ex__(protocol)
        return _rebuild, (base,), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__


_CLASSES = GeneratedClasses(GeneratedLayer)


def generated_class(cls: type, module: Optional[str] = None) -> type:
    """The class that is ``cls`` with :class:`GeneratedLayer` before it; the same one every time.

    Args:
        cls: a module whose ``forward()`` takes a graph.
        module: the module that shows the class; by default that of ``cls``.
    """
    return _CLASSES.of(cls, module)


def class_to_swap(cls: type) -> Optional[type]:
    """The class that ``edgeless.accelerate`` gives to a layer of a class without kernels; None to leave it."""
    ours = hasattr(cls, "_fusion_refusals") or issubclass(cls, GeneratedLayer)
    if ours or generate_choice() == "off" or not passes_messages(cls):
        return None
    return generated_class(cls)


_PASSES: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def passes_messages(cls: type) -> bool:
    """Whether the methods of a class call ``apply_edges()``, ``update_all()`` or ``edge_softmax()``."""
    if cls not in _PASSES:
        own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch" and base is not object]
        _PASSES[cls] = any(_calls(value) for base in own for value in vars(base).values())
    return _PASSES[cls]


def _calls(value: Any) -> bool:
    function = getattr(value, "__func__", getattr(value, "fget", value))
    return isinstance(function, types.FunctionType) and _names(function.__code__)


def _names(code: types.CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return not _STEPS.isdisjoint(code.co_names) or any(map(_names, inner))


def _rebuild(base: type):
    cls = generated_class(base)
    return cls.__new__(cls)


# One call ------------------------------------------------------------------------------------------------------------


def _run(layer, method, args: tuple, kwargs: dict) -> Any:
    if compiling():
        note_trace(type(layer), False, OF_PROGRAMS)
        return method(*args, **kwargs)
    graph = next((a for a in (*args, *kwargs.values()) if isinstance(a, DGLGraph)), None)
    if graph is None:
        return method(*args, **kwargs)
    choice = generate_choice()
    if choice == "auto" and graph._graph.num_edges(0) < worth.TINY and not looks_ahead():
        return _run_stock(layer, method, graph, args, kwargs, worth.OF_TINY)
    if watched_calls():
        args, kwargs = computed((args, kwargs))
    try:
        recorder = _recorder(layer, graph, choice, args, kwargs)
    except Refused as error:
        return _run_stock(layer, method, graph, args, kwargs, str(error))
    before = _State(layer, graph, _inputs(graph, args, kwargs))
    try:
        with compiling_at_once():
            result = _recorded(recorder, method, graph, args, kwargs, before.keep)
    except Exception as error:
        before.restore()
        if isinstance(error, Unrecorded):
            reason = str(error)
        else:
            reason = f"the recorded call fails, {type(error).__name__}: {str(error).strip()[:160]}"
        result = _run_stock(layer, method, graph, args, kwargs, reason)
        _note_refused(layer, graph, args, kwargs, reason)  # an error of the stock forward's is the caller's
        return result
    if recorder.ran:
        texts = [program.text for program in recorder.ran]
        how = "; ".join(dict.fromkeys(program.how for program in recorder.ran))
        ran_generated(layer, how, lambda: "\n".join(text() for text in texts))
    if recorder.refused:
        ran_stock(type(layer), layer, list(recorder.refused))
        if not recorder.ran and all(recorder.refused.values()):
            _note_refused(layer, graph, args, kwargs, "; ".join(recorder.refused))
    return result


def _run_stock(layer, method, graph, args: tuple, kwargs: dict, reason: str) -> Any:
    ran_stock(type(layer), layer, (reason,))
    try:
        return method(*args, **kwargs)
    except Exception as error:
        if reason not in (REFERENCE, OFF):
            add_call(error, layer, (*args, *kwargs.values()), (reason,))
        raise


def _recorder(layer, graph, choice: str, args: tuple, kwargs: dict) -> Recorder:
    """What records a call.

    Raises:
        Refused: the call has to run by the stock forward.
    """
    if choice == "off":
        raise Refused(OFF)
    if current_backend() == "reference":
        raise Refused(REFERENCE)
    if len(graph.canonical_etypes) != 1:
        raise Refused(f"graph has {len(graph.canonical_etypes)} edge types, and the layer works on one")
    num_edges, inputs = graph.num_edges(), _inputs(graph, args, kwargs)
    if choice == "auto":
        if graph.device.type != "cpu":
            raise Refused(f"DGL's layers do not run as programs on {graph.device.type} by default{worth.ANYWAY}")
        worth.refuse_small(num_edges, inputs, graph.device)
    refuse_modes(watched_calls())
    if num_edges < 1:
        raise Refused("there are no edges")
    for module in layer.modules():
        if module is not layer and any(map(module.__dict__.get, _HOOKS)):
            raise Refused(f"a {type(module).__name__} inside has a hook")
    forms = _refused.get(layer)
    if forms and (reason := forms.get(_form(layer, graph, args, kwargs))) is not None:
        raise Refused(reason)
    relation = relation_of(graph)
    if relation.refusal is not None:
        raise Refused(relation.refusal)
    if choice == "auto" and not looks_ahead():
        worth.refuse_early(layer, num_edges, inputs, graph.device)
    return Recorder(layer, graph, relation.handle, choice)


def _inputs(graph, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The tensors of a call: its arguments, and the features of the graph."""
    given = {str(place): a for place, a in enumerate(args)} | kwargs
    frames = [*graph._node_frames, *graph._edge_frames]
    return given | {name: getattr(column, "storage", None) for f in frames for name, column in f._columns.items()}


def _form(layer, graph, args: tuple, kwargs: dict) -> Any:
    """What calls have in common that are refused for the same reason."""

    def of(a):
        if isinstance(a, Tensor):
            return a.dtype, a.device, tuple(a.shape[1:]), a.requires_grad
        return type(a)

    inputs = pytree.tree_leaves((args, kwargs))
    modes = layer.training, torch.is_grad_enabled(), torch.is_autocast_enabled()
    return tuple(map(of, inputs)), tuple(kwargs), modes, graph.is_block


def _note_refused(layer, graph, args: tuple, kwargs: dict, reason: str) -> None:
    forms = _refused.setdefault(layer, {})
    if len(forms) < MOST_FORMS:
        forms[_form(layer, graph, args, kwargs)] = reason


def _recorded(recorder: Recorder, method, graph, args: tuple, kwargs: dict, keep) -> Any:
    """The stock forward's result for a graph that records; ``keep`` is called with tensors before they are written."""
    made = recorded(graph, recorder)

    def given(a):
        if a is graph:
            return made
        by_edge = type(a) is Tensor and a.dim() > 0 and a.size(0) == recorder.counts[EDGE] and not a.is_sparse
        return recorder.defer(recorder.leaf(a, EDGE)) if by_edge else a

    leaves, structure = pytree.tree_flatten((args, kwargs))
    args, kwargs = pytree.tree_unflatten([given(a) for a in leaves], structure)
    try:
        with custom_functions(), Watch(recorder, keep):
            result = finish(recorder, made, graph, method(*args, **kwargs))
        hand_over(made, graph)
        return result
    finally:
        recorder.ended = True
        put_back(made, graph)


class _State:
    """What a call may have changed before it is repeated by the stock forward."""

    def __init__(self, layer, graph, inputs: dict[str, Any]):
        self.layer, self.graph = layer, graph
        self._given = [t for t in pytree.tree_leaves((inputs, list(layer.buffers()))) if _memory(t) is not None]
        self._written: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.frames = graph._node_frames, graph._edge_frames
        self.columns = [(frame, dict(frame._columns)) for frames in self.frames for frame in frames]
        self.attributes = [(module, dict(module.__dict__)) for module in layer.modules()]
        self.buffers = [(b, b.clone()) for b in layer.buffers()] if layer.training else []
        self.generators = Generators(graph.device)

    def keep(self, tensor: Any) -> None:
        """Copies a tensor of the caller's that is going to be written, or that shares its memory with that."""
        if type(tensor) is Deferred:
            tensor = tensor.value.tensor if tensor.known is None else tensor.known
        memory = _memory(tensor)
        if memory is not None and memory not in self._written:
            self._written[memory] = [(t, t.detach().clone()) for t in self._given if _memory(t) == memory]

    def restore(self) -> None:
        """Sets everything back."""
        for frame, columns in self.columns:
            frame._columns.clear()
            frame._columns.update(columns)
        for module, attributes in self.attributes:
            if module.__dict__.keys() != attributes.keys() or any(
                module.__dict__[name] is not value for name, value in attributes.items()
            ):
                module.__dict__.clear()
                module.__dict__.update(attributes)
        with torch.no_grad():
            for tensor, value in (*self.buffers, *(pair for pairs in self._written.values() for pair in pairs)):
                tensor.copy_(value)
        self.generators.restore()


def _memory(tensor: Any) -> Optional[int]:
    """A number of the memory that a plain tensor has; None for anything else."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if plain else None
