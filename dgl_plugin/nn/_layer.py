"""Base of the fused DGL layers: the unsupported reasons of a call, and the steps around the attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from edgeless import FusedLayer, Graph
from edgeless.autocast import autocasts
from edgeless.checks import FLOATS, compiling
from edgeless.choices.backends import current_backend, kernel_refusal
from edgeless.distributed.graph import DistGraph
from edgeless.functional.layer import attention_layer
from edgeless.layers.adapter import inference_refusal, is_plain

from ..convert import Relation, relation_of, to_dgl
from ..generated.deferred import computed, watched_calls

_SPARSE = (torch.sparse_coo, torch.sparse_csr)
_NUMBERS = {nn.Dropout: "p", nn.LeakyReLU: "negative_slope"}


class DGLLayer(FusedLayer):
    """Mixin that precedes the upstream class, keeps its parameters and options, and fuses its message passing.

    The upstream layer raises DGLError for a graph with zero-in-degree nodes unless ``allow_zero_in_degree``. Such a
    call counts as unsupported here, so that the upstream layer raises. The graph caches whether it has such nodes.
    """

    # Submodules that the kernel replaces -> the class that each must have.
    _taken_over: tuple[tuple[str, type], ...] = ()
    # Methods of the upstream layer that its forward calls and the kernel replaces.
    _steps: tuple[Callable, ...] = ()
    # The compiled ops that the layer may run.
    _ops: tuple[str, ...] = ("attention",)
    # True if feat may have more dimensions than [N, F].
    _batch_dims = False
    # True if one Tensor of source features suffices when the destinations are other nodes.
    _sources_suffice = False
    # True if the layer begins with linear maps of feat, which torch supports for sparse tensors too.
    _maps_first = False
    # True if a DGL kernel combines rows of sources and destinations, which then must have one dtype.
    _one_dtype = False
    # Upstream layers that require in-edges set this option on the instance.
    _allow_zero_in_degree = True

    def _call(self, graph, *inputs):
        """Implements ``forward``. The graph is looked up once, and not at all under ``backend("reference")``."""
        if not compiling() and watched_calls():
            inputs = computed(inputs)
        if current_backend() != "reference":
            graph = relation_of(graph)
        return self._choose(graph, *inputs)

    def _state_refusals(self) -> list[str]:
        reasons = [
            f"{name} is not a plain {cls.__name__} of a number, or has hooks or another forward"
            for name, cls in self._taken_over
            if not _is_of_a_number(getattr(self, name), cls)
        ]
        reasons += [
            f"{step.__name__}() is overridden"
            for step in self._steps
            if getattr(type(self), step.__name__) is not step or step.__name__ in self.__dict__
        ]
        return reasons

    def _fusion_refusals(self, graph, feat, get_attention=False) -> list[str]:
        reasons = self._state_refusals()
        relation = relation_of(graph)
        reason = relation.refusal or self._input_refusal(relation, feat)
        if reason is not None:
            reasons.append(reason)
        return reasons

    def _input_refusal(self, relation: Relation, feat) -> Optional[str]:
        """Returns why the kernels do not support ``feat``, a Tensor or a pair, or None. The upstream layer raises the
        error.
        """
        handle = relation.handle
        sizes = (handle.num_src, handle.num_dst)
        if isinstance(feat, tuple):
            if type(handle) is DistGraph:
                return "feat is a pair, and a DistGraph has nodes of one kind"
            if len(feat) != 2:
                return f"feat is a tuple of {len(feat)}, not a pair"
        else:
            feat = (feat,)
            if not (relation.is_block or self._sources_suffice or sizes[0] == sizes[1]):
                return f"feat is one Tensor, but graph has {sizes[0]} source and {sizes[1]} destination nodes"
        for x, size in zip(feat, sizes):
            if not isinstance(x, Tensor):
                return f"feat is a {type(x).__name__}, not a Tensor or a pair of them"
            if x.dim() < 2 or (x.dim() > 2 and not self._batch_dims):
                return f"feat has shape {list(x.shape)}"
            if x.size(0) != size:
                return f"feat has {x.size(0)} rows for {size} nodes"
            if x.dtype not in FLOATS:
                return f"feat is {x.dtype}"
            if x.layout is not torch.strided and not (self._maps_first and x.dim() == 2 and x.layout in _SPARSE):
                return f"feat has the layout {x.layout}"
            if x.device != handle.device:
                return f"feat is on {x.device}, but graph is on {handle.device}"
            if reason := inference_refusal(x):
                return reason
        if self._one_dtype and len(dtypes := {x.dtype for x in feat}) > 1 and not _rounds(handle.device, dtypes):
            return f"feat is a pair of {feat[0].dtype} and {feat[1].dtype}"
        if not self._allow_zero_in_degree and handle.has_zero_in_degree:
            return "graph has nodes without in-edges, which the stock layer rejects unless allow_zero_in_degree is set"
        return next(filter(None, (kernel_refusal(handle.device, op) for op in self._ops)), None)

    def _for_stock(self, graph, *inputs):
        """The graph as the upstream layer takes it; ``inputs`` serve the error for a DistGraph, which it cannot."""
        if isinstance(graph, Relation):
            graph = graph.graph
        if isinstance(graph, DistGraph):
            self._refuse_parts(graph, *inputs)
        return to_dgl(graph) if isinstance(graph, Graph) else graph

    def _stock_forward(self, graph, *inputs):
        return super()._stock_forward(self._for_stock(graph, *inputs), *inputs)

    def _attention_dropout(self) -> float:
        """The dropout probability of attention weights in this call; as upstream, the submodule's mode decides."""
        return self.attn_drop.p if self.attn_drop.training else 0.0

    def _whole(
        self, graph: Graph, score: str, x: Tensor, linears, vectors, row: Optional[Tensor], coefficient, dropout=0.0
    ) -> Optional[Tensor]:
        """The layer up to its activation in one op: ``[N, H, C]`` for ``x`` ``[N, F]``, the features of both sources
        and destinations. None if its steps have to run one by one. See
        :func:`edgeless.functional.layer.attention_layer`.
        """
        return attention_layer(
            graph,
            score,
            x,
            linears,
            vectors=vectors,
            row=row,
            heads=self._num_heads,
            coefficient=coefficient,
            dropout=dropout,
            by_head=True,
            keeps_dtype=True,
        )


def _rounds(device: torch.device, dtypes: set) -> bool:
    """True if autocast is on and converts these dtypes to one."""
    return autocasts(device.type) and torch.float64 not in dtypes


def heads_of(x: Tensor, layer) -> Tensor:
    """Projected features ``[*, H * C]`` as ``[*, H, C]``."""
    return x.view(*x.shape[:-1], layer._num_heads, layer._out_feats)


def with_residual(layer, out: Tensor, h_dst: Tensor) -> Tensor:
    """``out`` ``[Nd, *, H, C]`` plus the residual of the destinations' features ``h_dst`` ``[Nd, *, F]``."""
    return out + heads_of(layer.res_fc(h_dst), layer)


def destinations(relation: Relation, x: Tensor) -> Tensor:
    """The destinations' rows among the sources' rows ``x``: the first of them in a block, else all."""
    return x[: relation.handle.num_dst] if relation.is_block else x


def _is_of_a_number(module: nn.Module, cls: type) -> bool:
    return is_plain(module, (cls,)) and isinstance(getattr(module, _NUMBERS[cls]), (int, float))
