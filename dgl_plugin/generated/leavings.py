"""Side effects of a recorded call: features of graphs and attributes of the layer that hold deferred tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._framework import DGLGraph
from .deferred import Deferred, computed, deferred_in
from .recorded_graph import RecordedGraph, compute_frames, deferred_columns

_OF_TORCH = frozenset(torch.nn.Module().__dict__)


def finish(recorder, made, graph, result: Any) -> Any:
    """Computes the deferred tensors that outlive the call, and returns the result with tensors and the caller's graph.

    Args:
        recorder: the recorder of the call.
        made: the stand-in that the layer got for ``graph``.
    """
    held = [place for module in recorder.layer.modules() for place in _held(_own(module), set())]
    values = [container[key] for container, key in held]
    leaves = pytree.tree_leaves(result)
    graphs = list({id(g): g for g in (made, *values, *leaves) if isinstance(g, DGLGraph)}.values())
    frames = [frame for g in graphs for frame in (*g._node_frames, *g._edge_frames)]
    columns = [column.storage for column in deferred_columns(frames)]
    recorder.compute_at_end([*deferred_in(result), *columns, *(v for v in values if type(v) is Deferred)])
    recorder.compute_all()  # deferred tensors that only other objects hold, such as closures
    compute_frames(frames)
    for container, key in held:
        value = container[key]
        container[key] = graph if value is made else computed(value)
    result = pytree.tree_map(lambda a: graph if a is made else a, computed(result))
    recorder.ended = True
    for each in graphs:
        if isinstance(each, RecordedGraph) and each is not made and each._recorder is recorder:
            _become_plain(each, graph)
    return result


def _become_plain(made: RecordedGraph, graph: DGLGraph) -> None:
    """Gives a copy of a stand-in the class of the caller's graph, which may be a stand-in of an outer layer's call."""
    made.__class__ = type(graph)
    if isinstance(graph, RecordedGraph):
        made._recorder = graph._recorder
    else:
        del made.__dict__["_recorder"]


def _own(module: torch.nn.Module) -> Iterator[tuple[dict, str]]:
    return ((module.__dict__, name) for name in list(module.__dict__) if name not in _OF_TORCH)


def _held(places: Iterator[tuple[Any, Any]], seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """Finds deferred tensors and graphs in nested lists and dictionaries; yields (container, key)."""
    for container, key in places:
        value = container[key]
        if type(value) is Deferred or isinstance(value, DGLGraph):
            yield container, key
        elif type(value) is tuple and deferred_in(value):
            container[key] = computed(value)
        elif type(value) in (list, dict) and id(value) not in seen:
            seen.add(id(value))
            keys = list(value) if type(value) is dict else range(len(value))
            yield from _held(((value, each) for each in keys), seen)
