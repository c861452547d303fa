"""Runs one call of a generated layer: recorded and computed by programs, or by the upstream forward."""

from __future__ import annotations

import weakref
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from edgeless.checks import compiling
from edgeless.choices.backends import current_backend
from edgeless.layers.call_errors import add_call
from edgeless.layers.calls import OF_PROGRAMS, REFERENCE, looks_ahead, note_trace, ran_generated, ran_stock
from edgeless.programs import EDGE, Refused, worth
from edgeless.programs.layers import OFF, compiling_at_once, generate_choice, refuse_modes

from .._framework import DGLGraph
from ..convert import relation_of
from .deferred import Deferred, Unrecorded, Watch, computed, watched_calls
from .generators import Generators
from .leavings import finish
from .recorded_graph import custom_functions, hand_over, put_back, recorded
from .recorder import Recorder

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MOST_FORMS = 64
# Layer -> form of calls -> the reason why such calls were refused. The upstream forward runs them from then on.
_refused: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()


def run(layer, method, args: tuple, kwargs: dict) -> Any:
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
        _note_refused(layer, graph, args, kwargs, reason)  # not reached if the upstream forward raises too
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
    """The recorder of a call.

    Raises:
        Refused: the call has to run by the upstream forward.
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
    """The inputs of a call by name: its arguments, and the features of the graph."""
    given = {str(place): a for place, a in enumerate(args)} | kwargs
    frames = [*graph._node_frames, *graph._edge_frames]
    return given | {name: getattr(column, "storage", None) for f in frames for name, column in f._columns.items()}


def _form(layer, graph, args: tuple, kwargs: dict) -> Any:
    """A key that is equal for calls that are refused for the same reason."""

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
    """Runs the upstream forward on a graph that records; ``keep`` is called with tensors before they are written."""
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
    """The state that a recorded call may change, so that the upstream forward can repeat the call from the start."""

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
        """Copies the caller's tensors that share memory with a tensor that will be written."""
        if type(tensor) is Deferred:
            tensor = tensor.value.tensor if tensor.known is None else tensor.known
        memory = _memory(tensor)
        if memory is not None and memory not in self._written:
            self._written[memory] = [(t, t.detach().clone()) for t in self._given if _memory(t) == memory]

    def restore(self) -> None:
        """Restores the state."""
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
    """An id of the storage of a plain tensor; None for any other object."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if plain else None
