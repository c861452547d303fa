"""HeteroGraphConv of DGL: one sum over all relations, if its layers are such sums."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from edgeless.autocast import autocasts
from edgeless.cache import graph_from_object
from edgeless.checks import compiling, opmath_dtype
from edgeless.choices.backends import current_backend, explain, kernel_refusal
from edgeless.functional.projection import PLAIN
from edgeless.graph.typed import TypedGraph
from edgeless.layers.adapter import inference_refusal, is_plain, named
from edgeless.layers.calls import ran_fused
from edgeless.layers.hetero_sum import FEW_RELATIONS, Target, join_edges, sum_of_layers

from .._framework import DGLGraph, stock_hetero
from .graphconv import GraphConv
from .sageconv import SAGEConv

_AGGREGATES = {stock_hetero._sum_reduce_func: "sum", stock_hetero._mean_reduce_func: "mean"}
_NOTHING = torch.empty(0, device="cpu")


class _Call(NamedTuple):
    """One layer call of the upstream forward."""

    relation: tuple[str, str, str]
    layer: nn.Module
    x: Any
    x_dst: Any
    args: tuple
    kwargs: dict


class HeteroGraphConv(stock_hetero.HeteroGraphConv):
    r"""``dgl.nn.HeteroGraphConv``, which calls a layer for each relation and aggregates their results for each node
    type.

    Constructor, parameters and results are those of the upstream layer. Where ``aggregate`` is ``"sum"`` or ``"mean"``
    and all layers that are called, at least four, are GraphConv with the same norm, or all are SAGEConv with the
    aggregator mean, of edgeless and with matrices of one shape, one sum over all relations replaces the calls.
    Otherwise every layer is called, and each call is fused or falls back on its own.
    """

    _joins_layers = True

    def forward(self, g, inputs, mod_args=None, mod_kwargs=None):
        """The output of every node type that is the destination of a relation, as upstream."""
        if self._aggregate is not None and current_backend() != "reference" and not compiling():
            calls = self._calls(g, inputs, mod_args, mod_kwargs)
            if calls is not None and _is_one_sum(g, calls):
                ran_fused(type(self), self, (g, inputs, mod_args, mod_kwargs))
                return self._one_sum(g, calls)
        return super().forward(g, inputs, mod_args, mod_kwargs)

    def __repr__(self) -> str:
        return named(self, super().__repr__())

    def _fusion_refusals(self, g, inputs, mod_args=None, mod_kwargs=None) -> list[str]:
        """The unsupported reasons of the layers that are called."""
        reasons = []

        def ask(etype):
            def record(graph, *args: Any, **kwargs: Any) -> Tensor:
                found = explain(self._get_module(etype), graph, *args, **kwargs)
                reasons.extend(f"of {etype!r}, {found.layer}: {reason}" for reason in found.reasons)
                return _NOTHING

            return record

        asked = SimpleNamespace(_get_module=ask, agg_fn=lambda outs, ntype: outs)
        stock_hetero.HeteroGraphConv.forward(asked, g, inputs, mod_args, mod_kwargs)
        return reasons

    @property
    def _aggregate(self) -> Optional[str]:
        """``"sum"`` or ``"mean"`` if the results of relations are joined so, else None."""
        aggregate = self.agg_fn
        return _AGGREGATES.get(aggregate.keywords.get("fn")) if type(aggregate) is partial else None

    def _calls(self, g, inputs, mod_args, mod_kwargs) -> Optional[list[_Call]]:
        """The layer calls of the upstream forward, without slicing the graph for each, which takes longer. None if
        relations are few, or if the upstream forward has to raise an error.
        """
        if not isinstance(g, DGLGraph) or len(g.canonical_etypes) < FEW_RELATIONS:
            return None
        sources, destinations = inputs if isinstance(inputs, tuple) and len(inputs) == 2 else (inputs, inputs)
        if not isinstance(sources, dict) or not isinstance(destinations, dict):
            return None
        pair, calls = isinstance(inputs, tuple), []
        for relation in g.canonical_etypes:
            source, etype, destination = relation
            if source not in sources or (destination not in destinations and (g.is_block or pair)):
                continue
            if destination not in destinations or not (etype in self.mod_dict or relation in self.mod_dict):
                return None
            x_dst = destinations[destination]
            if g.is_block and not pair and isinstance(x_dst, Tensor):
                x_dst = x_dst[: g.num_dst_nodes(destination)]
            args, kwargs = (mod_args or {}).get(etype, ()), (mod_kwargs or {}).get(etype, {})
            calls.append(_Call(relation, self._get_module(relation), sources[source], x_dst, args, kwargs))
        return calls

    # One sum ---------------------------------------------------------------------------------------------------------

    def _one_sum(self, g, calls: list[_Call]) -> dict[str, Tensor]:
        xs = {call.relation[0]: call.x for call in calls}
        sides = [{key: g.num_src_nodes(key) for key in xs}]
        called = {call.relation[2] for call in calls}
        sides.append({key: g.num_dst_nodes(key) for key in g.dsttypes if key in called})
        graph = _joined(g, [call.relation for call in calls], *sides)
        targets, counts = [], []
        for ntype, size in sides[1].items():
            own = [call for call in calls if call.relation[2] == ntype]
            counts.append(len(own))
            roots, biases = zip(*(_root_and_bias(call.layer) for call in own))
            targets.append(Target(size, own[0].x_dst, list(roots), list(biases)))
        x = torch.cat(list(xs.values())) if len(xs) > 1 else calls[0].x
        outs = sum_of_layers(graph, x, _weights(calls), targets, *_normalization(graph, calls[0].layer, x.dtype))
        if self._aggregate == "mean":
            outs = [out / count for out, count in zip(outs, counts)]
        return dict(zip(sides[1], outs))


def _is_one_sum(g, calls: list[_Call]) -> bool:
    """True if one sum over relations gives the same results as the calls of the layers."""
    if len(calls) < FEW_RELATIONS or {type(call.layer) for call in calls} not in ({GraphConv}, {SAGEConv}):
        return False
    operands, norms = set(), set()
    for relation, layer, x, x_dst, args, kwargs in calls:
        given = kwargs.get("weight") if type(layer) is GraphConv else None
        if args or kwargs.keys() - {"weight"} or (kwargs and type(given) not in PLAIN) or not _is_sum(layer, given):
            return False
        sizes = g.num_src_nodes(relation[0]), g.num_dst_nodes(relation[2])
        weight = _weight(layer, given)
        for side, size, root in zip((x, x_dst), sizes, (weight, _root_and_bias(layer)[0])):
            if type(side) not in PLAIN or side.dim() != 2 or side.size(0) != size or side.layout is not torch.strided:
                return False
            width = side.size(1) if root is None else root.size(0 if root is weight else 1)
            if side.size(1) != width or inference_refusal(side):
                return False
            operands.add((side.dtype, side.device))
        operands |= {(weight.dtype, weight.device), tuple(weight.shape)}
        norms.add(layer._norm if type(layer) is GraphConv else "right")
    if len(norms) > 1 or len(operands) > 2:  # (dtype, device) and the shape of the matrices
        return False
    device = calls[0].x.device
    return device == g.device and not autocasts(device.type) and kernel_refusal(device, "relational_sum") is None


def _is_sum(layer: nn.Module, given: Optional[Tensor]) -> bool:
    if not is_plain(layer, (GraphConv, SAGEConv)):
        return False
    if type(layer) is GraphConv:
        return layer._allow_zero_in_degree and layer._activation is None and (layer.weight is None) != (given is None)
    drops = layer.feat_drop.training and layer.feat_drop.p > 0
    if layer._aggre_type != "mean" or drops or layer.activation is not None or layer.norm is not None:
        return False
    return is_plain(layer.feat_drop, (nn.Dropout,)) and is_plain(layer.fc_self) and is_plain(layer.fc_neigh)


def _weight(layer: nn.Module, given: Optional[Tensor]) -> Tensor:
    """The matrix ``[F, C]`` for the neighbours of one relation."""
    if type(layer) is SAGEConv:
        return layer.fc_neigh.weight.t()
    return layer.weight if given is None else given


def _weights(calls: list[_Call]) -> Tensor:
    """The matrices ``[R, F, C]`` for the neighbours of all relations."""
    if type(calls[0].layer) is SAGEConv:
        return torch.stack([call.layer.fc_neigh.weight for call in calls]).transpose(1, 2)
    return torch.stack([_weight(call.layer, call.kwargs.get("weight")) for call in calls])


def _root_and_bias(layer: nn.Module) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """The matrix ``[C, F]`` for a node's own features and the bias ``[C]``; either may be None."""
    return (layer.fc_self.weight, layer.fc_self.bias) if type(layer) is SAGEConv else (None, layer.bias)


def _normalization(graph: TypedGraph, layer: nn.Module, dtype: torch.dtype) -> tuple[Optional[Tensor], str]:
    """The weights of the edges, or None, and ``"sum"`` or ``"mean"``, the reduction over a relation's neighbours."""
    norm = layer._norm if type(layer) is GraphConv else "right"
    if norm in ("none", "right"):
        return None, "mean" if norm == "right" else "sum"
    dtype = opmath_dtype(dtype)

    def build(of: TypedGraph) -> Tensor:
        of_source = of.reversed.mean_weight(dtype)
        return of_source if norm == "left" else (of_source * of.mean_weight(dtype)).sqrt()

    return graph.format(("norm", norm, dtype), build), "sum"


def _joined(g, relations: list[tuple], src_sizes: dict, dst_sizes: dict) -> TypedGraph:
    """The cached typed graph of these relations of a heterograph; its types are numbered in their order."""

    def build() -> TypedGraph:
        edges = {key: torch.stack(g.edges(order="eid", etype=key)) for key in relations}
        numbers = {key: number for number, key in enumerate(relations)}
        return join_edges("HeteroGraphConv", edges, numbers, src_sizes, dst_sizes, len(relations))

    return graph_from_object(g._graph, ("joined", *relations), build)
