"""HeteroConv of PyG: one sum over all relations, if its layers are such sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch_geometric.nn.conv import hetero_conv

from edgeless.autocast import autocasts
from edgeless.checks import compiling
from edgeless.choices.backends import current_backend, explain, kernel_refusal
from edgeless.layers.adapter import is_plain, named
from edgeless.layers.calls import ran_fused
from edgeless.layers.hetero_sum import FEW_RELATIONS, Target, sum_of_layers

from ..conv import LINEAR, PLAIN
from ..hetero import joined_graph
from .graph_conv import GraphConv
from .sage_conv import SAGEConv

_LAYERS = (SAGEConv, GraphConv)
_NOTHING = torch.empty(0, device="cpu")


class HeteroConv(hetero_conv.HeteroConv):
    r"""``torch_geometric.nn.HeteroConv``, which calls a layer for each relation and adds up, or otherwise aggregates,
    their results for each node type.

    Constructor, parameters and results are those of the upstream layer. Where ``aggr`` is ``"sum"`` and all layers that
    are called, at least four, are SAGEConv, or all are GraphConv, of edgeless with the same sum or mean and matrices of
    one shape, one sum over all relations replaces the calls. Otherwise every layer is called, and each call is fused or
    falls back on its own.
    """

    stock: ClassVar[type] = hetero_conv.HeteroConv
    _joins_layers = True

    def forward(self, *args_dict, **kwargs_dict):
        """The output of every node type that is the destination of a relation, as upstream."""
        sums = self.aggr == "sum" and {type(conv) for conv in self.convs.values()} in ({SAGEConv}, {GraphConv})
        sums = sums and len(args_dict) == 2 and not kwargs_dict and not compiling()
        if sums and current_backend() != "reference":
            calls = self._calls(args_dict, kwargs_dict)
            if self._is_one_sum(calls, args_dict[0]):
                ran_fused(type(self), self, args_dict)
                return self._one_sum({key: args[1] for key, (args, _) in calls.items()}, args_dict[0])
        return super().forward(*args_dict, **kwargs_dict)

    def __repr__(self) -> str:
        return named(self, super().__repr__())

    def _fusion_refusals(self, *args_dict, **kwargs_dict) -> list[str]:
        """The unsupported reasons of the layers that are called."""
        reasons = []
        for key, (args, kwargs) in self._calls(args_dict, kwargs_dict).items():
            found = explain(self.convs[key], *args, **kwargs)
            reasons += [f"of {key!r}, {found.layer}: {reason}" for reason in found.reasons]
        return reasons

    def _calls(self, args_dict: tuple, kwargs_dict: dict) -> dict[tuple, tuple[tuple, dict]]:
        """Relation -> the arguments that the upstream forward gives its layer; no layer is called here."""
        calls: dict[tuple, tuple[tuple, dict]] = {}

        def recorder(key: tuple):
            def record(*args: Any, **kwargs: Any) -> Tensor:
                calls[key] = (args, kwargs)
                return _NOTHING

            return record

        recorders = {key: recorder(key) for key, _ in self.convs.items()}
        hetero_conv.HeteroConv.forward(SimpleNamespace(convs=recorders, aggr="cat"), *args_dict, **kwargs_dict)
        return calls

    # One sum ---------------------------------------------------------------------------------------------------------

    def _is_one_sum(self, calls: dict, x_dict: Any) -> bool:
        """True if one sum over relations gives the same results as the calls of the layers."""
        if len(calls) < FEW_RELATIONS or not isinstance(x_dict, dict):
            return False
        reductions, operands = set(), set()
        for key, (args, _) in calls.items():
            conv = self.convs[key]
            sides = x_dict.get(key[0]), x_dict.get(key[-1])
            if len(args) != 2 or not _is_sum(conv) or type(args[1]) not in PLAIN:
                return False
            if any(type(x) not in PLAIN or x.dim() != 2 for x in sides) or conv._fusion_refusals(*args):
                return False
            weight, root = _neighbors(conv).weight, _root(conv)
            if sides[0].size(1) != weight.size(1) or (root is not None and sides[1].size(1) != root.weight.size(1)):
                return False  # the layer raises the error
            reductions.add(conv._reduce)
            operands.update((x.dtype, x.device) for x in (*sides, weight))
            operands.add(tuple(weight.shape))
        if len(reductions) > 1 or len(operands) > 2:  # (dtype, device) and the shape of the matrices
            return False
        device = args[1].device
        return not autocasts(device.type) and kernel_refusal(device, "relational_sum") is None

    def _one_sum(self, edges: dict, x_dict: dict) -> dict[Any, Tensor]:
        convs = {key: self.convs[key] for key in edges}
        sources, destinations = dict.fromkeys(key[0] for key in edges), dict.fromkeys(key[-1] for key in edges)
        src_sizes, dst_sizes = ({t: x_dict[t].size(0) for t in side} for side in (sources, destinations))
        numbers = {key: i for i, key in enumerate(edges)}
        graph = joined_graph("HeteroConv", edges, src_sizes, dst_sizes, numbers, len(edges))
        x = x_dict[next(iter(sources))] if len(sources) == 1 else torch.cat([x_dict[key] for key in sources])
        targets = []
        for node_type, size in dst_sizes.items():
            own = [conv for key, conv in convs.items() if key[-1] == node_type]
            roots = [None if (linear := _root(conv)) is None else linear.weight for conv in own]
            targets.append(Target(size, x_dict[node_type], roots, [_neighbors(conv).bias for conv in own]))
        weights = torch.stack([_neighbors(conv).weight for conv in convs.values()]).transpose(1, 2)
        outs = sum_of_layers(graph, x, weights, targets, reduce=next(iter(convs.values()))._reduce)
        return dict(zip(destinations, outs))


def _is_sum(conv: torch.nn.Module) -> bool:
    if not is_plain(conv, _LAYERS) or conv._reduce not in ("sum", "mean") or conv.flow != "source_to_target":
        return False
    if isinstance(conv, SAGEConv) and (conv.project or conv.normalize):
        return False
    linears = [linear for linear in (_neighbors(conv), _root(conv)) if linear is not None]
    return all(is_plain(linear, LINEAR) for linear in linears)


def _neighbors(conv: torch.nn.Module) -> torch.nn.Module:
    """The map of the neighbours' sum; it has the bias."""
    return conv.lin_l if isinstance(conv, SAGEConv) else conv.lin_rel


def _root(conv: torch.nn.Module) -> Optional[torch.nn.Module]:
    """The map of a node's own features, or None."""
    if isinstance(conv, SAGEConv):
        return conv.lin_r if conv.root_weight else None
    return conv.lin_root
