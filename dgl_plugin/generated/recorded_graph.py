"""The stand-in for a graph that a layer gets while a :class:`Recorder` records its computations.

It has the graph's structure, its features and all its methods. ``apply_edges()``, ``update_all()`` and
``edge_softmax()`` over all edges are deferred; everything else runs at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from edgeless.autocast import autocasts
from edgeless.programs import DESTINATION, EDGE, SOURCE, Refused
from edgeless.programs.front import modes as _modes

from .._framework import ALL, EdgeBatch, backend_sparse, is_all, is_builtin
from .deferred import Deferred, computed
from .expressions import BUILTINS, EDGE_SOFTMAX, FOLD, PRIMES, builtin
from .generators import Generators
from .mailbox import reduced_by_mailbox
from .recorder import Recorder

_LETTERS = {"u": SOURCE, "v": DESTINATION, "e": EDGE}
_PAIRS = {0: "u", 1: "v", 2: "e"}


class RecordedGraph:
    """Mixin that precedes DGLGraph or DGLBlock; :func:`recorded` makes its instances."""

    _recorder: Optional[Recorder] = None

    def apply_edges(self, func, edges=ALL, etype=None):
        """The upstream method, deferred if it runs over all edges."""
        if not self._records() or not is_all(edges):
            self._compute()
            return super().apply_edges(func, edges, etype)
        self._check_etype(etype)
        before = None if is_builtin(func) else Generators(self.device)
        try:
            data = self._messages(func)
        except Refused:
            if before is not None:  # the function is called again
                before.restore()
            self._compute()
            return super().apply_edges(func, edges, etype)
        self._set_e_repr(0, ALL, data)

    def update_all(self, message_func, reduce_func, apply_node_func=None, etype=None):
        """The upstream method, deferred until its result is read."""
        if not self._records() or apply_node_func is not None:
            self._compute()
            return super().update_all(message_func, reduce_func, apply_node_func, etype)
        self._check_etype(etype)
        before, messages = None if is_builtin(message_func) else Generators(self.device), None
        try:
            messages = self._messages(message_func)
            data = self._reduced(messages, reduce_func)
        except Refused:
            self._compute()
            if before is not None and messages is None:  # the function is called again
                before.restore()
            elif before is not None:
                known = computed(dict(messages))
                message_func = lambda edges: known  # noqa: E731
            return super().update_all(message_func, reduce_func, apply_node_func, etype)
        _, destination = self._graph.metagraph.find_edge(0)
        self._set_n_repr(destination, ALL, data)

    def _records(self) -> bool:
        """Returns whether the graph still has the edges of the call, and so records."""
        recorder = self._recorder
        return recorder is not None and self._graph is recorder.index and not recorder.ended

    def _check_etype(self, etype) -> None:
        """Raises DGL's error for an edge type that the graph does not have."""
        if etype is not None:
            self.get_etype_id(etype)

    def _frames(self) -> list:
        return [*self._node_frames, *self._edge_frames]

    def _compute(self) -> None:
        """Computes the deferred tensors among its features."""
        compute_frames(self._frames())

    def _operand(self, letter: str, field: str):
        data = {"u": self.srcdata, "v": self.dstdata, "e": self.edata}[letter]
        return self._recorder.leaf(computed(data[field]) if letter != "e" else data[field], _LETTERS[letter])

    def _messages(self, func) -> dict[str, Any]:
        if not is_builtin(func):
            data = func(_Edges(self, self._recorder))
            if not isinstance(data, Mapping):
                raise Refused("a function of edges returns no dictionary")
            return data
        if func.name not in BUILTINS:
            raise Refused(f"the built-in function {func.name} is not known")
        if hasattr(func, "lhs"):
            fields = [(_PAIRS[func.lhs], func.lhs_field), (_PAIRS[func.rhs], func.rhs_field)]
        else:
            fields = [(_PAIRS[func.target], func.in_field)]
        rows = [self._operand(*field) for field in fields]
        if len({row.dtype for row in rows}) > 1 and not autocasts("cuda"):
            raise Refused("features of a built-in function have several dtypes")
        if not all(row.dtype.is_floating_point for row in rows):
            raise Refused("features of a built-in function are integers")
        return {func.out_field: self._recorder.apply(builtin(func.name), *rows)}

    def _reduced(self, messages, reduce_func) -> dict[str, Any]:
        if not is_builtin(reduce_func):
            return reduced_by_mailbox(self, self._recorder, messages, reduce_func)
        if reduce_func.name not in FOLD or reduce_func.msg_field not in messages:
            raise Refused("the built-in reduction is not known")
        message = self._recorder.leaf(messages[reduce_func.msg_field], EDGE)
        if not message.dtype.is_floating_point:
            raise Refused("messages of a built-in reduction are integers")
        return {reduce_func.out_field: self._recorder.apply(FOLD[reduce_func.name], message)}


def compute_frames(frames: list) -> None:
    """Replaces deferred features by their tensors."""
    columns = deferred_columns(frames)
    for column, tensor in zip(columns, computed([column.storage for column in columns])):
        column.storage = tensor


def deferred_columns(frames: list) -> list:
    """The columns of frames that hold deferred tensors."""
    columns = [column for frame in frames for column in frame._columns.values()]
    return [column for column in columns if type(getattr(column, "storage", None)) is Deferred]


class _Edges(EdgeBatch):
    """A batch of all edges, the argument of a function of edges."""

    def __init__(self, graph: RecordedGraph, recorder: Recorder):
        self._of, self._recorder = graph, recorder
        src = _Rows(graph.srcdata, recorder, SOURCE)
        dst = _Rows(graph.dstdata, recorder, DESTINATION)
        super().__init__(graph, None, graph.canonical_etypes[0], src, _OwnRows(graph.edata, recorder), dst)

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, destinations and ids of the edges."""
        return self._of.edges(form="all")

    def batch_size(self) -> int:
        """The number of edges."""
        return self._of.num_edges()

    def __len__(self) -> int:
        return self.batch_size()


class _Rows(Mapping):
    """Features of nodes, as rows at the edges."""

    def __init__(self, data, recorder: Recorder, end: str):
        self._data, self._recorder, self._end = data, recorder, end

    def __getitem__(self, name: str) -> Deferred:
        return self._recorder.rows_at_edges(computed(self._data[name]), self._end)

    def __iter__(self) -> Iterator[str]:
        return iter(self._data.keys())

    def __len__(self) -> int:
        return len(self._data)


class _OwnRows(_Rows):
    """Features of edges."""

    def __init__(self, data, recorder: Recorder):
        super().__init__(data, recorder, EDGE)

    def __getitem__(self, name: str) -> Deferred:
        data = self._data[name]
        if type(data) is Deferred and data.recorder is self._recorder:
            return data
        return self._recorder.defer(self._recorder.leaf(data, EDGE))


_CLASSES: dict[type, type] = {}
# Graph -> its stand-ins that are not in use. Calls get the same one, since modules key things by the graph's id().
_idle: weakref.WeakKeyDictionary[Any, list[RecordedGraph]] = weakref.WeakKeyDictionary()


def recorded(graph, recorder: Recorder):
    """The stand-in for a graph; both share their features."""
    cls = type(graph)
    if not issubclass(cls, RecordedGraph):
        if cls not in _CLASSES:
            _CLASSES[cls] = type(cls.__name__, (RecordedGraph, cls), {"__module__": cls.__module__})
        cls = _CLASSES[cls]
    try:
        made = _idle.get(graph, []).pop()  # raises if another thread uses it
    except IndexError:
        made = cls.__new__(cls)
    made.__dict__ = dict(graph.__dict__)
    made.__class__, made._recorder = cls, recorder
    return made


def hand_over(made, graph) -> None:
    """Copies changes of a stand-in other than features to the graph, such as edges that were added."""
    for name, value in made.__dict__.items():
        if name != "_recorder" and graph.__dict__.get(name) is not value:
            graph.__dict__[name] = value


def put_back(made, graph) -> None:
    """Makes a stand-in behave as the graph itself for objects that still hold it, and keeps it for the next call."""
    made.__class__, made.__dict__ = type(graph), graph.__dict__
    _idle.setdefault(graph, []).append(made)


# DGL's functions of tensors -----------------------------------------------------------------------------------------


_originals: list[Any] = []  # torch's own method, once for each nested recorded call


@contextlib.contextmanager
def custom_functions() -> Iterator[None]:
    """Gives functions of autograd computed tensors instead of deferred ones, and records a softmax over in-edges."""
    function = torch.autograd.Function
    with _modes._PATCH:
        _originals.append(_originals[0] if _originals else function.__dict__["apply"])
        if len(_originals) == 1:
            function.apply = classmethod(_applied(_originals[0]))
    try:
        yield
    finally:
        with _modes._PATCH:
            original = _originals.pop()
            if not _originals:
                function.apply = original


def _applied(original):
    def apply(cls, *args, **kwargs):
        if any(type(a) is Deferred for a in args):
            if cls is backend_sparse.EdgeSoftmax and (found := softmax_of_edges(*args)) is not None:
                return found
            args = computed(args)
        return original.__get__(None, cls)(*args, **kwargs)  # a descriptor of Python, or of C from torch 2.14 on

    return apply


def softmax_of_edges(index, logits, eids=ALL, norm_by: str = "dst"):
    """Records the softmax of deferred logits over the in-edges of each destination; None if it cannot be recorded."""
    if type(logits) is not Deferred or logits.known is not None or not is_all(eids) or norm_by != "dst":
        return None
    if index is not logits.recorder.index or logits.value.shape[0] != PRIMES.edges:
        return None
    return logits.recorder.apply(EDGE_SOFTMAX, logits.value)
