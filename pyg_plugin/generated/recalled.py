"""Finds the program of a call from an earlier call, without computing the key again.

A :class:`Recalled` keeps the objects that the key of a call has read. :class:`edgeless._C.SameCall` compares them by
identity, and the call's tensors by dtype, device and shape, except for the numbers of nodes and edges. Where anything
differs, the key is computed.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from edgeless import _C
from edgeless.capture.watching import is_seen
from edgeless.choices.backends import current_backend, transform_refusal
from edgeless.graph.handle import Graph
from edgeless.graph.weak_cache import graph_of_edge_index
from edgeless.programs import EDGE, PARAMETER, SOURCE, ProgramCache
from edgeless.programs.keys import note, taking_notes

from ..conv import _HOOKS
from .edge_values import watches

CALLS = 4  # kept for each step of a layer, for example one for training and one for inference
_calls: weakref.WeakKeyDictionary[Any, dict[str, list[Recalled]]] = weakref.WeakKeyDictionary()
_MOST_LAYERS = 4096  # some of them may be kept alive by a kept call
_ENVIRONMENT = getattr(os.environ, "_data", None)  # a dictionary, which a note can compare
_CHOICE = "EDGELESS_GENERATE"


class Recalled:
    """A call that ran a program.

    Args:
        call: the call.
        notes: the objects that its key has read.
        size: the argument ``size`` of the call.
        choice: the value of ``EDGELESS_GENERATE``, whose changes the notes detect.
        program: the program that the call ran.
        cleared: how often the cache of programs had been cleared.
        parts: the programs of the joined calls of ``edge_updater()``.

    Attributes:
        approved: the number of edges and the dtype of ids for which the program was found to be profitable.
    """

    __slots__ = (
        "same",
        "held",
        "choice",
        "program",
        "spaces",
        "receiving",
        "flow",
        "cleared",
        "approved",
        "parts",
        "first_own",
    )

    def __init__(self, call, notes: list[tuple], edge_index: Tensor, size, choice: str, program, cleared: int, parts):
        sides = {PARAMETER: 0, EDGE: 3}
        rows = [(sides.get(s.kind, 1 if call.one_set or s.kind == SOURCE else 2), s.dim) for s in call.spaces]
        told = (False, False) if size is None else tuple(n is not None for n in size)
        # The objects that SameCall refers to. It keeps neither the call's tensors, of which only dtypes and shapes are
        # compared, nor the layer, since this object is looked up by the layer.
        own = [t if i >= call.first_own else t.new_empty(0) for i, t in enumerate(call.tensors)]
        held = [(None if read is call.layer else read, a, b) for _, read, a, b in notes]
        self.held = (held, call.given, own)
        self.same = _C.SameCall(
            notes=notes,
            given=call.given,
            edge_index=edge_index,
            tensors=call.tensors,
            kept=own,
            own=call.first_own,
            rows=rows,
            sizes=told,
            one_set=call.one_set,
        )
        self.program, self.receiving, self.flow, self.cleared = program, call.receiving, call.layer.flow, cleared
        self.choice, self.spaces, self.approved = choice, call.spaces, None
        self.parts, self.first_own = parts, call.first_own


def recall(
    layer, step: str, edge_index, kwargs: dict[str, Any], programs: ProgramCache, parts: Sequence = ()
) -> Optional[tuple[Recalled, Graph, list[Tensor]]]:
    """Returns the earlier call and this call's graph and tensors, or None if the key has to be computed.

    Args:
        parts: the programs of the calls of ``edge_updater()`` that are joined with this call.
    """
    steps = _calls.get(layer)
    found = None if steps is None else steps.get(step)
    if found is None or type(edge_index) is not Tensor or current_backend() == "reference" or transform_refusal():
        return None
    if (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()) and is_seen(watches()):
        return None
    for entry in found:
        same = entry.same.match(edge_index, kwargs)
        if same is not None and entry.cleared == programs.cleared and all(map(operator.is_, parts, entry.parts)):
            tensors, *counts = same
            receiving = entry.receiving
            try:
                graph = graph_of_edge_index(
                    edge_index, edge_index, counts[1 - receiving], counts[receiving], entry.flow, False
                )
            except (IndexError, ValueError, TypeError):  # the full checks raise it with the right message
                return None
            return entry, graph, tensors
    return None


class Remembering:
    """Computes the key of a call and, after its program ran, keeps the objects that the key has read.

    Args:
        name: the name under which the call is kept: that of the step, or ``"joined"``.
    """

    def __init__(self, call, layer, step: str, name: str):
        self.call, self.layer, self.step, self.name = call, layer, step, name

    def key(self):
        """The key of the call."""
        with taking_notes() as self.notes:
            kind, attribute = type(self.layer), "attribute"
            for name in (self.step, "message", "aggregate", "update", "edge_update", "message_and_aggregate"):
                note(attribute, kind, name, getattr(kind, name))
            steps = vars(kind).get("_stock_steps_of")
            if steps is None or _ENVIRONMENT is None:
                note("unknown", kind)
            else:
                note(attribute, kind, "_stock_steps_of", steps)
                note("dict", steps)
                name = os.environ.encodekey(_CHOICE)
                note("item", _ENVIRONMENT, name, _ENVIRONMENT.get(name, ...))
            for name in _HOOKS:
                if name in self.layer.__dict__:
                    note("dict", self.layer.__dict__[name])
            return self.call.key()

    def keep(self, edge_index: Tensor, size, choice: str, program, programs: ProgramCache, parts: list) -> None:
        """Keeps the call."""
        if type(edge_index) is not Tensor or any(kind == "unknown" for kind, *_ in self.notes):
            return
        if not (size is None or type(size) is tuple):
            return
        found = _calls.setdefault(self.layer, {}).setdefault(self.name, [])
        found.insert(0, Recalled(self.call, self.notes, edge_index, size, choice, program, programs.cleared, parts))
        del found[CALLS:]
        while len(_calls) > _MOST_LAYERS:
            del _calls[next(iter(_calls))]
