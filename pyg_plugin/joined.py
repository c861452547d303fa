"""Joins the layers of ``to_hetero``, which are separate calls in its fx graph, to one sum over relations."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any, Optional

import torch
from torch import Tensor, fx

from edgeless.checks import compiling
from edgeless.choices.backends import current_backend
from edgeless.layers.calls import ran_fused
from edgeless.layers.hetero_sum import FEW_RELATIONS

from .nn.graph_conv import GraphConv
from .nn.hetero_conv import HeteroConv
from .nn.sage_conv import SAGEConv

_ADDS = (torch.add, operator.add)


class JoinedConvs(torch.nn.Module):
    """Calls the layers of several relations and adds their results for each node type, as one sum if possible.

    The module has no parameters and no submodules of its own: the layers stay where ``to_hetero`` put them.

    Args:
        layers: the ModuleDict of the layers.
        names: relation -> the name of its layer in ``layers``.
    """

    _joins_layers = True

    def __init__(self, layers: torch.nn.ModuleDict, names: dict[tuple, str]):
        super().__init__()
        hetero = HeteroConv({key: layers[name] for key, name in names.items()}, aggr="sum")
        vars(self).update(_layers=layers, _names=names, _hetero=hetero)  # bypasses the registration as submodules

    def forward(self, x_dict: dict[str, Optional[Tensor]], edge_index_dict: dict[tuple, Any]) -> dict[str, Tensor]:
        """The sum for every type of destination nodes."""
        calls = {key: (_rows(x_dict, key), edge_index_dict[key]) for key in self._names}
        if current_backend() != "reference" and not compiling() and self._is_one_sum(calls, x_dict):
            ran_fused(HeteroConv, self, (x_dict, edge_index_dict))
            return self._hetero._one_sum(edge_index_dict, x_dict)
        outs: dict[str, deque] = {}
        for key, inputs in calls.items():
            outs.setdefault(key[-1], deque()).append(self._layers[self._names[key]](*inputs))
        return {node_type: _added(found) for node_type, found in outs.items()}

    def _is_one_sum(self, calls: dict, x_dict: dict) -> bool:
        convs = self._hetero.convs
        if any(convs[key] is not self._layers[name] for key, name in self._names.items()):
            return False  # a layer was replaced
        if {type(conv) for conv in convs.values()} not in ({SAGEConv}, {GraphConv}):
            return False
        return self._hetero._is_one_sum({key: (inputs, {}) for key, inputs in calls.items()}, x_dict)


def _rows(x_dict: dict, key: tuple) -> Any:
    return x_dict[key[0]] if key[0] == key[-1] else (x_dict[key[0]], x_dict[key[-1]])


def _added(outs: deque) -> Tensor:
    """The sum of tensors, in the order of ``to_hetero``."""
    while len(outs) > 1:
        outs.append(outs.popleft() + outs.popleft())
    return outs[0]


def join(model: torch.nn.Module) -> list[tuple[str, int]]:
    """Joins the layers of ``to_hetero`` inside a model; returns the name and the number of layers of each group."""
    joined = []
    for prefix, module in model.named_modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for group, layers in list(module.named_modules()):
            if isinstance(layers, torch.nn.ModuleDict) and (count := _join_group(module, group, layers)):
                joined.append((f"{prefix}.{group}" if prefix else group, count))
    return joined


def _join_group(module: fx.GraphModule, group: str, layers: torch.nn.ModuleDict) -> int:
    """Joins the calls of the layers of one ModuleDict; returns their number, or 0 if they cannot be joined."""
    if {type(layer) for layer in layers.values()} not in ({SAGEConv}, {GraphConv}):
        return 0
    nodes = list(module.graph.nodes)
    calls = {}
    for node in nodes:
        if node.op == "call_module" and str(node.target).rpartition(".")[0] == group:
            key = tuple(str(node.target).rpartition(".")[2].split("__"))
            if key in calls or len(key) != 3 or len(node.args) != 2 or node.kwargs:
                return 0
            calls[key] = node
    if len(calls) < FEW_RELATIONS:
        return 0
    features, roots = _features(calls), _roots(calls)
    if features is None or roots is None:
        return 0
    places = {node: place for place, node in enumerate(nodes)}
    last = max(calls.values(), key=places.__getitem__)
    inner = _below(roots.values())
    if any(places[user] < places[last] for node in inner for user in node.users if user not in inner):
        return 0  # a sum is read before the last layer is called
    name = f"{group.replace('.', '_')}_joined"
    module.add_submodule(name, JoinedConvs(layers, {key: str(n.target).rpartition(".")[2] for key, n in calls.items()}))
    keys, names = tuple(features), tuple(calls)
    with module.graph.inserting_before(last.next):
        x_dict = module.graph.call_function(_make_dict, (keys, tuple(features.values())))
        edges = module.graph.call_function(_make_dict, (names, tuple(node.args[1] for node in calls.values())))
        sums = module.graph.call_module(name, (x_dict, edges))
        for node_type, root in roots.items():
            root.replace_all_uses_with(module.graph.call_function(operator.getitem, (sums, node_type)))
    for node in sorted(inner, key=places.__getitem__, reverse=True):
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return len(calls)


def _make_dict(keys: tuple, values: tuple) -> dict:
    """The arguments of a call; fx takes no tuples as keys of a dictionary of nodes."""
    return dict(zip(keys, values))


def _features(calls: dict[tuple, fx.Node]) -> Optional[dict[str, fx.Node]]:
    """The node of every node type's features, or None where a type has several."""
    features: dict[str, fx.Node] = {}
    for key, node in calls.items():
        x = node.args[0]
        sides = x if isinstance(x, (tuple, list)) else (x, x)
        if len(sides) != 2 or (isinstance(x, fx.Node) and key[0] != key[-1]):
            return None
        for node_type, side in zip((key[0], key[-1]), sides):
            if not isinstance(side, fx.Node) or features.setdefault(node_type, side) is not side:
                return None
    return features


def _roots(calls: dict[tuple, fx.Node]) -> Optional[dict[str, fx.Node]]:
    """The node with the sum of all layers that lead to a node type, or None where they are joined in another way."""
    roots: dict[str, fx.Node] = {}
    for node_type in dict.fromkeys(key[-1] for key in calls):
        known = [node for key, node in calls.items() if key[-1] == node_type]
        while len(known) > 1:
            node = known[0]
            if len(node.users) != 1:
                return None
            (add,) = node.users
            if add.target not in _ADDS or add.kwargs or len(add.args) != 2:
                return None
            if any(arg not in known or len(arg.users) != 1 for arg in add.args) or add.args[0] is add.args[1]:
                return None
            known = [*(n for n in known if n not in add.args), add]
        roots[node_type] = known[0]
    return roots


def _below(roots) -> set[fx.Node]:
    """The sums and the calls of layers that lead to the roots."""
    found, queue = set(), deque(roots)
    while queue:
        node = queue.popleft()
        found.add(node)
        if node.op != "call_module":
            queue.extend(node.args)
    return found
