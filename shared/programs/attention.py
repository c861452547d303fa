"""Attention as a message function, whose second derivatives are programs.

The kernels of attention compute first derivatives. For second derivatives their plain form
(``core_cuda/attention/plain.h``) calls :func:`attention_program`, which runs a program of the same function, whose
gradients can be differentiated again without an edge tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..capture.watching import is_seen
from ..choices.backends import transform_refusal
from ..graph.adjacency import Compressed
from ..graph.handle import Graph
from . import worth
from .cache import ProgramCache
from .front.spaces import DESTINATION, EDGE, FIRST, NODE, SOURCE, Argument, Refused, Sizes, Space
from .layers import generate_choice

PROGRAMS = ProgramCache(64)
SCORES = ("gatv2", "gat", "dot")
_DST, _SRC, _VALUE, _ATT, _EDGE_ATTR, _EDGE_PROJ, _EDGE_SCALE = range(7)
_NAMES = ("dst", "src", "value", "att", "edge_attr", "edge_proj", "edge_scale")
_KINDS = (DESTINATION, SOURCE, SOURCE, None, EDGE, None, EDGE)
_asked: dict[tuple, int] = {}  # key -> the numbers of edge values that its calls have computed


class _Attention:
    """``softmax(score) @ values`` of a row's edges, or the weights of edges, as a function that can be traced."""

    def __init__(self, places: Sequence[int], score: str, coefficient: float, dropout: float, weights: bool):
        self.places, self.score, self.coefficient = places, score, coefficient
        self.dropout, self.weights = dropout, weights

    def __call__(self, sizes: Sizes, ends: Tensor, ids: Tensor, seed: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        from .front import ops  # imports the tracer

        given: list[Optional[Tensor]] = [None] * len(_NAMES)
        for place, tensor in zip(self.places, tensors):
            given[place] = tensor
        dst, src, value, att, edge_attr, edge_proj, scale = given
        own, keys = dst.index_select(0, ends[1]), src.index_select(0, ends[0])
        values = keys if value is None else value.index_select(0, ends[0])
        if edge_attr is not None:
            term = (edge_attr @ edge_proj.flatten(0, 1).t()).view(-1, *own.shape[1:])
        if self.score == "dot":
            keys, values = (keys + term, values + term) if edge_attr is not None else (keys, values)
            logits = (own * keys).sum(-1) * self.coefficient
        else:
            both = own + keys
            both = F.leaky_relu(both if edge_attr is None else both + term, self.coefficient)
            logits = (both * att).sum(-1) if self.score == "gatv2" else both.squeeze(2)
        index = ends[1].unsqueeze(1).expand_as(logits)
        rows = logits.new_zeros(sizes.destinations, logits.size(1))
        largest = rows.scatter_reduce(0, index, logits.detach(), "amax", include_self=False)
        exponents = (logits - largest.index_select(0, ends[1])).exp()
        totals = rows.index_add(0, ends[1], exponents)
        found = exponents / totals.index_select(0, ends[1])
        if self.dropout > 0:  # with the key 0 it draws the mask of the kernels
            found = found * ops.dropout_scale(found.detach(), seed, ids, 0, self.dropout)
        if self.weights:
            return (found,)
        found = found if scale is None else found * scale
        messages = found.unsqueeze(2) * values
        return (messages.new_zeros(sizes.destinations, *messages.shape[1:]).index_add(0, ends[1], messages),)


def attention_program(
    inputs: Sequence[Optional[Tensor]],
    csr: Sequence[Tensor],
    csc: Sequence[Tensor],
    seed: Optional[Tensor],
    score: str,
    coefficient: float,
    dropout: float,
    weights: bool,
) -> list[Tensor]:
    """The op ``edgeless::attention_program``: ``[output]`` or ``[weights]``; ``[]`` where no program is profitable."""
    try:
        return [_run(inputs, csr, csc, seed, score, coefficient, dropout, weights)]
    except Refused:
        return []


def _run(inputs, csr, csc, seed, score: str, coefficient: float, dropout: float, weights: bool) -> Tensor:
    choice, device = generate_choice(), inputs[_DST].device
    if choice in ("off", "land") or score not in SCORES or is_seen() or transform_refusal():
        raise Refused("programs do not run now")
    dst, src = (_rows(inputs[place]) for place in (_DST, _SRC))
    edges, counts = csr[1].size(0), (src.size(0), dst.size(0))
    if not edges or not min(counts):
        raise Refused("there are no edges")
    needed = [place for place, t in enumerate(inputs) if t is not None and not (weights and place in (2, 6))]
    dtype = torch.float64 if dst.dtype is torch.float64 else torch.float32
    tensors = [_rows(inputs[place]) if place < 3 else inputs[place] for place in needed]
    tensors = [t if t.dtype is dtype else t.to(dtype) for t in tensors]
    sizes = Sizes(*counts, edges)
    options = (score, float(coefficient), float(dropout), weights, sizes.one_set)
    wanted = [FIRST + i for i, t in enumerate(tensors) if t.requires_grad]
    key = (options, dtype, device, tuple(needed), tuple(wanted), *(tuple(t.shape[1:]) for t in tensors))
    if choice == "auto":
        _refuse_few(key, edges * max(t[0].numel() for t, place in zip(tensors, needed) if place < 3), device)
    function = _Attention(needed, *options[:4])
    program = PROGRAMS.get(key, function, lambda: _arguments(needed, tensors, sizes, device), sizes.one_set, 1, wanted)
    program.landing = None  # it would land on the kernels, whose gradients this program computes
    graph = Graph(Compressed(*_three(csr)), Compressed(*_three(csc)) if len(csc) else None, *counts)
    if choice == "auto":
        worth.refuse_slow(program, graph)
    nothing = torch.zeros(1, dtype=torch.int64)
    return program(graph, tensors, nothing if seed is None else seed)[0]


def _refuse_few(key: tuple, numbers: int, device: torch.device) -> None:
    """Refuses calls that a program would not make faster, or that have not yet repaid the trace of a program."""
    total = _asked[key] = _asked.get(key, 0) + numbers
    if numbers < worth.LEAST.get(device.type, numbers + 1):
        raise Refused("a program would be slower")
    if key not in PROGRAMS and total < worth.TRACED[device.type] and numbers < worth.AT_ONCE:
        raise Refused("no program is made yet")


def _rows(t: Tensor) -> Tensor:
    """Rows ``[N, H, D]``; logits ``[N, H]`` get ``D = 1``."""
    return t.unsqueeze(2) if t.dim() == 2 else t


def _three(arrays: Sequence[Tensor]) -> list[Optional[Tensor]]:
    return [*arrays, *[None] * (3 - len(arrays))]


def _arguments(needed: Sequence[int], tensors: Sequence[Tensor], sizes: Sizes, device: torch.device) -> list[Argument]:
    ends = torch.zeros(2, 1, dtype=torch.int64, device=device)
    found: list[Any] = [
        Argument(ends, Space(EDGE, 1, is_ends=True), name="edge_index"),
        Argument(ends[0], Space(EDGE, 0), name="edge_ids"),
        Argument(ends[0], Space(), name="seed"),
    ]
    for place, tensor in zip(needed, tensors):
        kind = _KINDS[place]
        kind = NODE if sizes.one_set and kind in (SOURCE, DESTINATION) else kind
        found.append(Argument(tensor, Space() if kind is None else Space(kind, 0), name=_NAMES[place]))
    return found
