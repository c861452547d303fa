"""The layers whose forwards run as a whole, since they make edge tensors, and the state of each thread's forward."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Optional, Union

from torch import Tensor

from edgeless.programs import EDGE, Refused

from .messages import Call

NEXT = "its forward makes tensors by edge, so that it runs as a whole from its next call on"


class _Thread(threading.local):
    """The state of this thread's forward.

    Attributes:
        given: the layer whose forward runs, and its arguments by name.
        traced: whether a forward runs for a trace or a check, where ``propagate()`` is the upstream method.
        refused: a layer, and the reason why this call of its ``propagate()`` runs by the upstream method.
    """

    given: Optional[tuple[Any, dict[str, Any]]] = None
    traced = False
    refused: Optional[tuple[Any, str]] = None


class Whole:
    """A layer whose forward runs as a program; ``by_node`` names an argument with a row for each node."""

    def __init__(self, by_node: str):
        self.by_node = by_node


STATE = _Thread()
# Layer -> its Whole if it makes edge tensors, else the reason why its forward is no program.
LAYERS: weakref.WeakKeyDictionary[Any, Union[Whole, str]] = weakref.WeakKeyDictionary()


def runs_whole(layer) -> bool:
    """Returns whether a layer was observed to make edge tensors, and no reason against a program of its forward is
    known.
    """
    return isinstance(LAYERS.get(layer), Whole)


def notice(layer, call: Call) -> None:
    """Looks for edge tensors that the forward has made among the arguments of its ``propagate()``.

    Raises:
        Refused: the forward has made some, and will run as a whole from now on; or a program of it was refused.
    """
    if STATE.refused is not None and STATE.refused[0] is layer:
        raise Refused(STATE.refused[1])
    if STATE.given is None or STATE.given[0] is not layer or layer in LAYERS:
        return
    given = STATE.given[1]
    ids = {id(value) for value in given.values()}
    own = list(zip(call.tensors, call.spaces))[: call.first_own]
    made = sum(t.numel() for t, space in own if space.kind == EDGE and id(t) not in ids)
    nodes = [name for name, t in given.items() if isinstance(t, Tensor) and t.dim() and t.size(0) == call.counts[0]]
    if made <= call.num_edges:  # narrow tensors cost little, and existing ops may read them
        LAYERS[layer] = "it makes no tensors by edge"
        return
    if not (call.one_set and nodes):
        LAYERS[layer] = "its nodes cannot be told by the arguments"
        return
    LAYERS[layer] = Whole(nodes[0])
    STATE.refused = layer, NEXT
    raise Refused(NEXT)


@contextlib.contextmanager
def thread_state(name: str, value: Any) -> Iterator[None]:
    before = getattr(STATE, name)
    setattr(STATE, name, value)
    try:
        yield
    finally:
        setattr(STATE, name, before)
