"""Adds to the error of a layer's call why the call was not fused, and the arguments of the call."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

import torch

from .calls import NotFusedError, name_of

_MOST_CHARACTERS = 200  # limit of the text that describes a layer
_MOST_ENTRIES = 4  # limit of the entries that a message lists of a dictionary or sequence


def add_call(error: Exception, called: Any, inputs: tuple | dict, reasons: Sequence[str] = ()) -> None:
    """Adds to the message of an error the call and, if the upstream layer or function ran, why it did.

    An unsupported reason often names the wrong argument, while the upstream layer fails in some later op. The error
    stays the same object; an error whose argument is no message is not changed.

    Args:
        error: the exception that the layer or function raised.
        called: the layer or function.
        inputs: the arguments, by position or by name.
        reasons: the unsupported reasons; empty if the fused forward raised the error.
    """
    if isinstance(error, (KeyError, NotFusedError)) or any(type(a) is not str for a in error.args):
        return
    if len(error.args) > 1:
        return
    is_module = isinstance(called, torch.nn.Module)
    name = type(called).__name__ if is_module else name_of(called).rpartition(".")[2]
    if not isinstance(inputs, dict):
        inputs = dict(zip(inspect.signature(called.forward if is_module else called).parameters, inputs))
    given = ", ".join(f"{name}: {_described(value)}" for name, value in inputs.items())
    why = f"{name} ran its stock forward, because {'; because '.join(reasons)}. " if reasons else ""
    said = textwrap.shorten(repr(called), _MOST_CHARACTERS, placeholder=" ...") if is_module else name
    text = f"edgeless: {why}The call was {said} with {given}."
    error.args = ("\n".join((*error.args, text)),)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    if isinstance(value, dict):
        entries = [f"{key!r}: {_described(of)}" for key, of in list(value.items())[:_MOST_ENTRIES]]
        return "{" + ", ".join(entries) + (", ..." if len(value) > _MOST_ENTRIES else "") + "}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "graph"):
        more = ", ..." if len(value) > _MOST_ENTRIES else ""
        return f"({', '.join(map(_described, value[:_MOST_ENTRIES]))}{more})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    graph = getattr(value, "graph", value)  # DGL's layers look up a graph before they choose
    return type(graph).__name__
